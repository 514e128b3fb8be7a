"""Runs SFT under one strategy, each run in turn: as ranks of FSDP, or as a controller with Ray workers."""

import json
import os
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from rank_processes import each_run
from sft_run import CountSteps
from tiny import bare_trainer
from waiting import wait_for

from rlightning.algorithms import SFT
from rlightning.callbacks import CompletionsTable, ControllerMode, RunReport, SaveHF, Throughput
from rlightning.controller import RayController
from rlightning.controller.worker_group import WorkerGroup
from rlightning.data import PromptDataModule
from rlightning.hooks import RLCallback
from rlightning.models import Adapter
from rlightning.parallel import FSDP
from rlightning.parallel.collectives import global_rank


def process_ids(group: WorkerGroup) -> list[int]:
    """The workers' process ids, by rank."""
    import ray

    return ray.get([actor.process_id.options(concurrency_group="commands").remote() for actor in group.actors])


touched: list[str] = []
"""The stacks of whatever makes a CUDA context."""


def note_touch(*args: Any, **kwargs: Any) -> None:
    """In place of what makes a context."""
    touched.append("".join(traceback.format_stack(limit=6)))


def note_stream(*args: Any) -> Any:
    """In place of a stream, which torch's build for CUDA would ask the driver for."""
    note_touch()
    return SimpleNamespace(is_capturing=lambda: False)


def pretend_cuda() -> None:
    """Have torch find the device."""
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda._lazy_init = note_touch
    torch.cuda.get_rng_state_all = lambda: [note_touch()]  # type: ignore[func-returns-value, list-item]
    torch.cuda.set_rng_state_all = note_touch
    torch.accelerator.current_stream = note_stream


OF_THROUGHPUT = ("time/", "throughput/", "memory/")
RAY_OPTIONS = {"num_cpus": 4, "object_store_memory": 200 << 20}


class LoggingSFT(SFT):
    """Logs for an epoch's end, in all ways, what each rank has of its own."""

    def training_step(self, prompts: Any, batch_idx: int) -> None:
        super().training_step(prompts, batch_idx)
        value = float((global_rank() + 1) * self.weight_version)
        size = 1 + self.weight_version % 2
        self.log("own/bar", value, prog_bar=True, logger=False)
        self.log("own/hidden", value, logger=False)
        self.log("own/mean", value, on_step=False, on_epoch=True, batch_size=size)
        self.log("own/both", value, on_step=True, on_epoch=True, batch_size=size)
        self.log("all/mean", value, on_step=False, on_epoch=True, batch_size=size, sync_dist=True)
        self.log("all/sum", value, on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.log("all/max", value, on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True)
        self.log("all/min", value, on_step=True, on_epoch=True, reduce_fx="min", sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.log("end/own", float(global_rank() + 1))
        self.log("end/all", float(global_rank() + 1), sync_dist=True)


class Spy(Callback):
    """Notes all of Lightning's hooks that it gets where the actor is, and what the Trainer says then."""

    runs_in = "workers"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen: list[list[Any]] = []

    def teardown(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.note("teardown", trainer)
        if trainer.is_global_zero:
            self.path.write_text(json.dumps(self.seen))

    def note(self, hook: str, trainer: Any) -> None:
        """One hook: when it came, and the limits of the run as it sees them."""
        when = [trainer.current_epoch, trainer.global_step, trainer.fit_loop.epoch_loop.batch_idx]
        limits = [trainer.max_steps, trainer.max_epochs, str(trainer.num_training_batches)]
        stage = None if trainer.state.stage is None else trainer.state.stage.value
        self.seen.append([hook, stage, *when, trainer.is_last_batch, *limits])


def spy_on(hook: str) -> Any:
    return lambda self, trainer, *args, **kwargs: self.note(hook, trainer)


for name in vars(Callback):
    if name.startswith("on_") or name == "setup":
        setattr(Spy, name, spy_on(name))


class Record(RLCallback):
    """Notes what was logged, and the hooks in their order."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.validations: list[dict[str, float]] = []
        self.hooks: list[str] = []
        self.epochs: list[dict[str, float]] = []
        self.shown: list[dict[str, float]] = []
        self.logged: list[list[str]] = []
        self.of_throughput: list[str] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch:
            self.epochs.append(measured(trainer))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.of_throughput = sorted(name for name in trainer.logged_metrics if name.startswith(OF_THROUGHPUT))
        self.epochs.append(measured(trainer))

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.hooks.append("on_train_batch_start")

    def on_rollout_start(self, trainer: Any, module: Any, prompts: Any) -> None:
        self.hooks.append("on_rollout_start")

    def on_reward_end(self, trainer: Any, module: Any, batch: Any) -> None:
        assert batch.rewards.shape == (batch.num_sequences,)
        self.hooks.append("on_reward_end")

    def on_update_end(self, trainer: Any, module: Any, batch: Any) -> None:
        self.hooks.append(f"on_update_end {trainer.global_step} {module.weight_version}")

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.hooks.append("on_train_batch_end")
        self.steps.append(measured(trainer))
        self.shown.append(dict(trainer.progress_bar_metrics))
        self.logged.append(sorted(name for name in trainer.logged_metrics if not name.startswith(OF_THROUGHPUT)))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.validations.append({**measured(trainer), "at": trainer.global_step})


def measured(trainer: Any) -> dict[str, float]:
    """Return the logged metrics without times and memory."""
    metrics = trainer.callback_metrics.items()
    return {name: float(v) for name, v in metrics if not name.startswith(OF_THROUGHPUT)}


def train(
    folder: Path, max_steps: int, strategy: Any, *, ckpt_path: str | None = None, adapter: Adapter | None = None
) -> None:
    """Train with a checkpoint a step and a validation each second one; ``seen.json`` gets what was logged."""
    folder.mkdir(exist_ok=True)
    source = folder.parent
    model = str(source / "model")
    if adapter is not None:
        seed_everything(3, verbose=False)  # of its first values
    module = LoggingSFT(model, prompts_per_step=4, lr=1e-2, warmup_steps=6, weight_decay=0.1, adapter=adapter)
    rows = str(source / "rows.jsonl")
    data = PromptDataModule(rows, validation={"rows": rows}, max_prompt_tokens=16, validation_batch_size=6)
    record = Record()
    checkpoints = ModelCheckpoint(
        folder / "checkpoints", "{step}", every_n_train_steps=1, save_top_k=-1, save_last="link"
    )
    of_epochs = ModelCheckpoint(folder / "checkpoints", "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    observers = [record, Spy(folder / "spied.json"), CountSteps(), Throughput(), RunReport(), CompletionsTable(1)]
    trainer = bare_trainer(
        folder,
        max_steps,
        ControllerMode(),
        *observers,
        SaveHF(every_n_steps=2),
        checkpoints,
        of_epochs,
        logger=CSVLogger(folder),
        strategy=strategy,
        devices=2 if isinstance(strategy, FSDP) else 1,
        enable_checkpointing=True,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=1,
    )
    trainer.fit(module, data, ckpt_path=ckpt_path)
    if trainer.is_global_zero:
        callbacks = [type(callback).__name__ for callback in trainer.callbacks]  # type: ignore[attr-defined]
        seen = {**vars(record), "_trainer": None, "global_step": trainer.global_step, "device_callbacks": callbacks}
        seen |= {"touched": touched, "is_initialized": torch.cuda.is_initialized()}
        (folder / "part.json").write_text(json.dumps(seen, default=str))
        (folder / "part.json").rename(folder / "seen.json")


def make_strategy(num_workers: int = 2, max_restarts: int = 0, **own: Any) -> FSDP | RayController:
    """FSDP with these arguments in a process that is a rank; in one that is none, a controller of workers under it."""
    if "RANK" in os.environ:
        return FSDP(**own)
    return RayController(
        worker_strategy=FSDP(**own),
        num_workers=num_workers,
        accelerator="cpu",
        ray_options={**RAY_OPTIONS, "num_cpus": num_workers + 2},
        max_restarts=max_restarts,
    )


def train_each(folder: Path, runs: dict[str, dict[str, Any]]) -> None:
    """Each run leaves its log, its checkpoints and its Hugging Face folder in ``FOLDER/NAME``.

    Args:
        folder: has the model and the rows.
        runs: the arguments of :func:`train`, by name; one that goes on from a checkpoint waits for its run to end.
    """
    if "RANK" not in os.environ:
        pretend_cuda()
    for name, arguments in each_run(runs):
        if "ckpt_path" in arguments:
            wait_for((Path(arguments["ckpt_path"]).parents[1] / "seen.json").exists)
        train(folder / name, strategy=make_strategy(), **arguments)


def train_alone(folder: Path) -> None:
    """A step by this process itself."""
    pretend_cuda()
    train(folder / "alone", 1, "auto")
