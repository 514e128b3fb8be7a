"""GRPO, with engines or without, under FSDP's ranks or a controller's workers; as ``controller_run.py``."""

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from controller_run import Record as StepRecord
from controller_run import make_strategy, measured
from engine_run import make_data, make_module, make_rollout, make_trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from rank_processes import each_run
from tiny import full_weights
from waiting import still_running, wait_for

from rlightning.callbacks import (
    CompletionsTable,
    DeviceSyncBeforeBarrier,
    EmptyCacheAfterUpdate,
    OffloadDuringRollout,
    RemotizeOnHeadOnly,
    TransformersRollout,
)
from rlightning.controller.tensor_store import live_entries, stores_results
from rlightning.hooks import RLCallback
from rlightning.parallel import FSDP
from rlightning.parallel import device as platform


class Record(StepRecord):
    """Notes further hooks and what was sampled; the same under both strategies."""

    def __init__(self) -> None:
        super().__init__()
        self.sampled: list[list[Any]] = []
        self.updated: list[list[int]] = []

    def on_weight_sync_start(self, trainer: Any, module: Any, weight_version: int) -> None:
        self.hooks.append(f"on_weight_sync_start {weight_version}")

    def on_weight_sync_end(self, trainer: Any, module: Any, weight_version: int) -> None:
        self.hooks.append(f"on_weight_sync_end {weight_version}")

    def on_rollout_end(self, trainer: Any, module: Any, batch: Any) -> None:
        self.hooks.append("on_rollout_end")
        self.sampled.append([[p.index, c.text] for p, c in zip(batch.prompts, batch.completions, strict=True)])

    def on_reward_start(self, trainer: Any, module: Any, batch: Any) -> None:
        self.hooks.append("on_reward_start")

    def on_update_start(self, trainer: Any, module: Any, batch: Any) -> None:
        self.hooks.append("on_update_start")
        self.updated.append(batch.group_ids.tolist())
        assert batch.advantages.shape == (batch.num_tokens,)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.hooks.append("on_validation_start")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.hooks.append("on_validation_end")
        self.validations.append({n: v for n, v in measured(trainer).items() if n.startswith("val/")})


class Leftovers(RLCallback):
    """Notes what is left of a step's results in a worker when the next begins; the controller lets go meanwhile."""

    runs_in = "workers"

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        with contextlib.suppress(AssertionError):
            wait_for(lambda: not live_entries(), 60)
        with (Path(trainer.default_root_dir) / f"leftovers{trainer.global_rank}").open("a") as file:
            file.write(f"{batch_idx} {live_entries()} {stores_results()}\n")


class AtWork(RLCallback):
    """Has a worker take its CPU for a device, and writes what the cures did there, with the weights at the end."""

    runs_in = "workers"

    def __init__(self) -> None:
        self.num_synchronized = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        OffloadDuringRollout.device_type = "cpu"
        platform.synchronize = self.synchronize

    def synchronize(self, device: Any = None) -> None:
        self.num_synchronized += 1

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        weights = full_weights(pl_module.loaded_actor)  # from all ranks
        (offload,) = (callback for callback in trainer.callbacks if isinstance(callback, OffloadDuringRollout))
        cures = {"offloaded": offload.last["memory/offloaded_gib"], "synchronized": self.num_synchronized}
        folder = Path(trainer.default_root_dir)
        torch.save(weights, folder / f"weights{trainer.global_rank}.pt")
        (folder / f"cures{trainer.global_rank}.json").write_text(json.dumps(cures | {"pid": os.getpid()}))


class DieOnce(RLCallback):
    """Kills the worker in its second step, and finds its engines when the next worker has begun."""

    runs_in = "workers"

    def on_update_start(self, trainer: Any, module: Any, batch: Any) -> None:
        mark = Path(trainer.default_root_dir) / "engines-of-the-dead"
        if module.weight_version == 1 and not mark.exists():
            mark.write_text(json.dumps([engine.process.pid for engine in module.generator._engines.engines]))
            os.kill(os.getpid(), signal.SIGKILL)

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        folder = Path(trainer.default_root_dir)
        pids = json.loads((folder / "engines-of-the-dead").read_text())
        kept = [engine.process.pid for engine in module.generator._engines.engines]
        left = still_running(set(pids) - set(kept))
        (folder / "engines.json").write_text(json.dumps({"before": pids, "kept": kept, "left": left}))


class AwaitCompletions(RLCallback):
    """Begins an update when all is complete that engines have been asked for: none of it is of newer weights."""

    runs_in = "workers"

    def on_update_start(self, trainer: Any, module: Any, batch: Any) -> None:
        for group in list(module.generator._collector._running):
            group.result()


def train(
    folder: Path,
    strategy: Any,
    num_ranks: int,
    *,
    max_steps: int = 2,
    rollout: Any = None,
    module: Any = None,
    dies: bool = False,
) -> None:
    """Train for some steps, with a validation before the first; with engines if ``rollout`` is given."""
    folder.mkdir(exist_ok=True)
    restarting = [DieOnce(), ModelCheckpoint(folder / "checkpoints", every_n_train_steps=1)] if dies else []
    waiting = [AwaitCompletions()] if (rollout or {}).get("max_staleness") else []
    data = make_data(folder.parent, validation={"sums": str(folder.parent / "sums.jsonl")})
    record = Record()
    usual: dict[str, Any] = {"seed": 3, "max_new_tokens": 8, "verify_every": 1}
    engine = TransformersRollout(**usual) if rollout is None else make_rollout(**usual | rollout)
    trainer = make_trainer(
        folder,
        max_steps,
        engine,
        record,
        EmptyCacheAfterUpdate(),
        DeviceSyncBeforeBarrier(),
        OffloadDuringRollout(),
        RemotizeOnHeadOnly(),
        Leftovers(),
        AtWork(),
        CompletionsTable(1),
        *restarting,
        *waiting,
        strategy=strategy,
        enable_checkpointing=dies,
        devices=num_ranks if isinstance(strategy, FSDP) else 1,
    )
    trainer.fit(make_module(str(folder.parent / "model"), **module or {}), data)
    found = {**vars(record), "_trainer": None, "pid": os.getpid()}
    (folder / f"seen{trainer.global_rank}.json").write_text(json.dumps(found, default=str))


def train_each(folder: Path, runs: dict[str, dict[str, Any]]) -> None:
    """Each entry of ``runs`` has the arguments of :func:`train`."""
    for name, arguments in each_run(runs):
        num_ranks, own = arguments.pop("num_ranks", 2), arguments.pop("strategy", {})
        strategy = make_strategy(num_ranks, max_restarts=int(arguments.get("dies", False)), **own)
        train(folder / name, strategy, num_ranks, **arguments)
