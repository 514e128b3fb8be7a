"""GRPO under a controller: samples, metrics and hooks are those of ranks on the same seed; and its engines."""

import contextlib
import json
import os
import signal
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from controller_run import Record as StepRecord
from controller_run import make_strategy, measured
from engine_run import make_data, make_module, make_rollout, make_trainer, save_model
from lightning.pytorch.callbacks import ModelCheckpoint
from rank_processes import each_run, finish, start_calls, start_controller
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
from rlightning.models import Adapter
from rlightning.parallel import FSDP
from rlightning.parallel import device as platform

pytestmark = pytest.mark.processes


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
            wait_for(lambda: not live_entries())
        with (Path(trainer.default_root_dir) / f"leftovers{trainer.global_rank}").open("a") as file:
            file.write(f"{batch_idx} {live_entries()} {stores_results()}\n")


class AtWork(RLCallback):
    """Has a worker take its CPU for a device; writes what the memory callbacks did, and the weights at the end."""

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
        did = {"offloaded": offload.last["memory/offloaded_gib"], "synchronized": self.num_synchronized}
        did["sends_adapter"] = pl_module.sends_adapter
        folder = Path(trainer.default_root_dir)
        torch.save(weights, folder / f"weights{trainer.global_rank}.pt")
        (folder / f"callbacks{trainer.global_rank}.json").write_text(json.dumps(did | {"pid": os.getpid()}))


class DieOnce(RLCallback):
    """Kills the worker in its second step, and finds its engines when the next worker has begun."""

    runs_in = "workers"

    def on_update_start(self, trainer: Any, module: Any, batch: Any) -> None:
        mark = Path(trainer.default_root_dir) / "engines-of-the-dead"
        if module.weight_version == 1 and not mark.exists():
            mark.write_text(json.dumps([engine.process.pid for engine in module.sampler._engines.samplers]))
            os.kill(os.getpid(), signal.SIGKILL)

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        folder = Path(trainer.default_root_dir)
        pids = json.loads((folder / "engines-of-the-dead").read_text())
        kept = [engine.process.pid for engine in module.sampler._engines.samplers]
        left = still_running(set(pids) - set(kept))
        (folder / "engines.json").write_text(json.dumps({"before": pids, "kept": kept, "left": left}))


class AwaitCompletions(RLCallback):
    """Begins an update when all is complete that engines have been asked for: none of it is of newer weights."""

    runs_in = "workers"

    def on_update_start(self, trainer: Any, module: Any, batch: Any) -> None:
        for group in list(module.sampler._collector._running):
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


FOUR = {
    "num_ranks": 4,
    "strategy": {"tensor_parallel_size": 2},
    "rollout": {"placement": "standalone", "num_engines": 1},
}


def seen(folder: Path, name: str, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name / f"seen{rank}.json").read_text())
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks and two workers, which sample by themselves; then one worker with an engine."""
    folder = tmp_path_factory.mktemp("rollout")
    save_model(folder / "model")
    ranks = start_calls(train_each, 2, folder, {"ranks": {}})
    with_engine = {"num_ranks": 1, "rollout": {}}
    finish([*ranks, start_controller(train_each, folder, {"workers": {}, "engine": with_engine})])
    return folder


def test_controller_receives_all_samples_in_rank_order(two: Path) -> None:
    ranks = [seen(two, "ranks", rank)["sampled"] for rank in (0, 1)]
    for step, sampled in enumerate(seen(two, "workers")["sampled"]):
        assert sampled == ranks[0][step] + ranks[1][step]
    assert len(ranks[0]) == 2


def test_shares_of_the_update_keep_the_groups_numbers(two: Path) -> None:
    ranks = [seen(two, "ranks", rank)["updated"] for rank in (0, 1)]
    assert seen(two, "workers")["updated"] == [one + other for one, other in zip(*ranks, strict=True)]


def test_the_curve_is_that_of_ranks(two: Path) -> None:
    expected, got = seen(two, "ranks"), seen(two, "workers")
    assert got["validations"] == expected["validations"] != []
    for one, other in zip(expected["steps"], got["steps"], strict=True):
        assert other == pytest.approx(one, abs=1e-5)
        assert other["optim/grad_norm"] > 0


def test_hooks_come_in_the_order_of_ranks(two: Path) -> None:
    assert seen(two, "workers")["hooks"] == seen(two, "ranks")["hooks"]


def assert_same_weights(folder: Path, num_ranks: int) -> None:
    for rank in range(num_ranks):
        expected, got = (torch.load(folder / run / f"weights{rank}.pt") for run in ("ranks", "workers"))
        assert expected.keys() == got.keys()
        for name, weight in expected.items():
            torch.testing.assert_close(got[name], weight, atol=1e-6, rtol=0.0)


def test_the_weights_are_those_of_ranks(two: Path) -> None:
    assert_same_weights(two, 2)


def test_device_callbacks_run_in_workers_not_controller(two: Path) -> None:
    ranks, workers = (
        [json.loads((two / run / f"callbacks{rank}.json").read_text()) for rank in range(2)]
        for run in ("ranks", "workers")
    )
    assert all(found["offloaded"] > 0 for found in workers)
    assert [found["offloaded"] for found in workers] == [found["offloaded"] for found in ranks]
    assert all(found["synchronized"] > 0 for found in workers)
    assert seen(two, "workers")["pid"] not in [found["pid"] for found in workers]


def test_controller_table_has_completions_of_all_ranks(two: Path) -> None:
    tables = [pyarrow.parquet.read_table(two / run / "completions").to_pydict() for run in ("workers", "ranks")]
    rows = [sorted(zip(t["step"], t["prompt_index"], t["completion"], t["reward"], strict=True)) for t in tables]
    assert rows[0] == rows[1] and len(rows[0]) == 16


def test_worker_samples_from_its_engine(two: Path) -> None:
    found = seen(two, "engine")
    assert [len(sampled) for sampled in found["sampled"]] == [8, 8]
    # The same prompts, weights and seed, by another sampler.
    prompts = [[index for index, _ in step] for step in seen(two, "workers")["sampled"]]
    assert [[index for index, _ in step] for step in found["sampled"]] == prompts
    assert (two / "engine" / "engine.log").is_file()
    assert all(step["policy/rollout_gap_max"] < 1e-3 for step in found["steps"])


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks and, at the same time, four workers that share an engine; then runs with engines in the same cluster.

    A worker that is killed starts again, with an engine of its own and with two that are actors. An engine is ahead of
    two workers, and ahead of two that train an adapter.
    """
    folder = tmp_path_factory.mktemp("many")
    save_model(folder / "model", num_key_value_heads=2)
    dies: dict[str, Any] = {"num_ranks": 1, "dies": True}
    runs = {
        "workers": FOUR,
        "colocated": dies | {"rollout": {}},
        "standalone": dies | {"rollout": {"placement": "standalone", "num_engines": 2}},
        "ahead": {"rollout": {"placement": "standalone", "num_engines": 1, "max_staleness": 1}, "max_steps": 3},
    }
    runs["adapter"] = runs["ahead"] | {"module": {"adapter": Adapter(rank=4), "kl_coef": 0.1}}
    finish([*start_calls(train_each, 4, folder, {"ranks": FOUR}), start_controller(train_each, folder, runs)])
    return folder


@pytest.mark.slow
def test_data_and_tensor_parallel_workers_match_ranks(many: Path) -> None:
    """Two data-parallel groups of two tensor-parallel ranks, which share an engine: the workers' is an actor."""
    expected, got = seen(many, "ranks"), seen(many, "workers")
    assert got["hooks"] == expected["hooks"]
    for one, other in zip(expected["steps"], got["steps"], strict=True):
        assert other == pytest.approx(one, abs=1e-5)
    assert_same_weights(many, 4)
    heads = [seen(many, "ranks", rank)["updated"] for rank in (0, 2)]
    assert got["updated"] == [one + other for one, other in zip(*heads, strict=True)]
    sampled = [seen(many, "ranks", rank)["sampled"] for rank in range(4)]
    assert got["sampled"] == [list(chain(*parts)) for parts in zip(*sampled, strict=True)]
    for rank in range(4):
        lines = (many / "workers" / f"leftovers{rank}").read_text().splitlines()
        assert lines == [f"{step} 0 {rank % 2 == 0}" for step in range(2)]


@pytest.mark.slow
def test_a_restart_goes_on_with_engines(many: Path) -> None:
    """A worker that is killed takes its engine with it; an actor's goes on. What the step had sampled comes again."""
    for name in ("colocated", "standalone"):
        found, engines = seen(many, name), json.loads((many / name / "engines.json").read_text())
        first, *lost, again = found["sampled"]  # what a killed worker has sampled may not have come to the controller
        assert lost in ([], [again]) and again != first
        assert len(found["steps"]) == 2 and engines["left"] == []
        assert (engines["kept"] == engines["before"]) == (name == "standalone")


@pytest.mark.slow
def test_standalone_engines_are_actors_of_their_own(many: Path) -> None:
    """Standalone engines sample the same as colocated ones, end with the run, and sample ahead with a staleness."""
    expected, got = seen(many, "colocated"), seen(many, "standalone")
    assert [got["sampled"][n] for n in (0, -1)] == [expected["sampled"][n] for n in (0, -1)]
    assert got["validations"] == expected["validations"]
    for number in range(2):
        assert (many / "standalone" / f"engine.{number}.log").is_file()
    steps = seen(many, "ahead")["steps"]
    assert [step["async/staleness_max"] for step in steps] == [0, 1, 1]
    assert all("policy/correction_weight" in step for step in steps)
    named = []
    for command_line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            if str(many).encode() in command_line.read_bytes():
                named.append(int(command_line.parent.name))
    assert still_running(named) == []


@pytest.mark.slow
def test_workers_send_adapter_to_an_engine_actor(many: Path) -> None:
    """Workers send the adapter alone, not merged, at each step, while the engine samples ahead."""
    found = seen(many, "adapter")
    did = [json.loads((many / "adapter" / f"callbacks{rank}.json").read_text()) for rank in range(2)]
    assert [one["sends_adapter"] for one in did] == [True, True]
    syncs = [hook for hook in found["hooks"] if hook.startswith("on_weight_sync_start")]
    assert syncs == [f"on_weight_sync_start {version}" for version in (0, 0, 1, 2, 3)]
    assert [step["async/staleness_max"] for step in found["steps"]] == [0, 1, 1]
    assert found["steps"][0]["policy/rollout_gap_max"] < 1e-3
    assert found["steps"][-1]["policy/kl"] > 0
    weights = [torch.load(many / "adapter" / f"weights{rank}.pt") for rank in range(2)]
    assert any("lora_B" in name and weight.abs().max() > 0 for name, weight in weights[0].items())
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name])
