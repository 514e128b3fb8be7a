"""Fit, test and validate in turn under a controller, the workers keeping the weights; all is sent to them twice.

In the same cluster, before: fast development runs. Ray's workers import this file, and could not import the test's own.
"""

from pathlib import Path
from typing import Any

import torch
from controller_run import RAY_OPTIONS, process_ids
from tiny import GenerateInWorkers, bare_trainer, make_algorithm

from rlightning.algorithms import GRPO
from rlightning.callbacks import JSONLPredictions
from rlightning.controller import RayController
from rlightning.controller.tensor_store import tensor_store
from rlightning.controller.worker_group import WorkerGroup
from rlightning.controller.worker_trainer import trainer_settings
from rlightning.data import PromptDataModule
from rlightning.errors import ConfigError
from rlightning.hooks import RLCallback

MAX_STORE_BYTES = 1 << 24
SETTINGS: dict[str, Any] = {
    "deterministic": "warn",
    "benchmark": True,
    "detect_anomaly": True,
    "inference_mode": False,
}


class InWorkers(GenerateInWorkers):
    """A callback of the user's that needs the actor and ends training.

    What a worker stores is capped there, and its Trainer has the settings of the controller's.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        assert tensor_store().max_bytes == MAX_STORE_BYTES
        assert SETTINGS.items() <= trainer_settings(trainer).items()
        assert trainer.datamodule.max_prompt_tokens == 58  # 64 positions, less 6 of a completion

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.should_stop = trainer.global_step == 2


class Staying(list[Any]):
    """Rows of the controller's, which no other process gets as they are."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AssertionError("the rows are sent")


class Taken(RLCallback):
    """Counts the prompts of all rollouts: a step that refills its batch asks for more than the loader gave.

    It also asks something of the workers, in a hook in which it may not, and in one in which it may.
    """

    def __init__(self) -> None:
        self.indices: list[int] = []
        self.refused: set[str] = set()
        self.versions: list[int] = []

    def on_rollout_start(self, trainer: Any, module: Any, prompts: Any) -> None:
        self.indices += [prompt.index for prompt in prompts]
        if trainer.training:
            try:
                trainer.strategy.call("version")
            except ConfigError as error:
                self.refused.add(str(error))

    def on_update_end(self, trainer: Any, module: Any, batch: Any) -> None:
        self.versions.append(trainer.strategy.call("version"))


class Refilling(GRPO):
    """Drops every group of the first rollout of a step."""

    max_refills = 1
    num_calls = 0

    def version(self) -> int:
        return self.weight_version

    def keep_sequences(self, batch: Any) -> torch.Tensor:
        self.num_calls += 1
        return torch.full((batch.num_sequences,), self.num_calls % 2 == 0)


def send_twice(send: Any) -> Any:
    """Send a command twice, as after a lost acknowledgement."""

    def call(self: WorkerGroup, actor: Any, method: str, *arguments: Any, **options: Any) -> Any:
        first = send(self, actor, method, *arguments, **options)
        if method in ("run", "execute", "supply"):
            send(self, actor, method, *arguments, **options)
        return first

    return call


def run_fast(folder: Path, lr_schedule: str) -> float:
    """A fast development run, which is shorter than the schedule's warm-up; the learning rate of its one step."""
    module = make_algorithm(GRPO, folder / "model", lr=0.3, warmup_steps=3, lr_schedule=lr_schedule)
    strategy = RayController(num_workers=1, accelerator="cpu", ray_options=RAY_OPTIONS)
    trainer = bare_trainer(folder, 4, GenerateInWorkers(), strategy=strategy, fast_dev_run=True)
    trainer.fit(module, PromptDataModule([{"prompt": "1+1="}] * 8, shuffle=False))
    strategy.close()
    return float(trainer.callback_metrics["optim/lr"])


def run(folder: Path) -> dict[str, Any]:
    """All stages, and fast development runs."""
    of_fast_runs = [run_fast(folder, lr_schedule) for lr_schedule in ("linear", "cosine")]
    WorkerGroup._call = send_twice(WorkerGroup._call)  # type: ignore[method-assign]
    rows = Staying({"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4))
    data = PromptDataModule(rows, validation={"sums": rows}, predict=rows, shuffle=False)
    module = make_algorithm(Refilling, folder / "model", lr=1e-1, validate_first=False)
    taken = Taken()
    strategy = RayController(
        num_workers=2,
        worker_strategy="ddp",
        accelerator="cpu",
        max_store_bytes=MAX_STORE_BYTES,
        ray_options=RAY_OPTIONS,
    )
    trainer = bare_trainer(
        folder,
        4,
        InWorkers(),
        taken,
        JSONLPredictions(),
        strategy=strategy,
        val_check_interval=4,
        check_val_every_n_epoch=None,
        **SETTINGS,
    )
    trainer.fit(module, data)
    fitted = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
    position = data.stream.position if data.stream is not None else None
    pids = process_ids(strategy.group) if strategy.group is not None else []
    num_steps = trainer.global_step
    [tested] = trainer.test(module, data, verbose=False)
    [validated] = trainer.validate(module, data, verbose=False)
    trainer.predict(module, data, return_predictions=False)
    same = strategy.group is not None and pids == process_ids(strategy.group)
    return {
        "fitted": fitted,
        "num_steps": num_steps,
        "tested": tested,
        "validated": validated,
        "taken": taken.indices,
        "position": position,
        "same": same,
        "refused": list(taken.refused),
        "versions": taken.versions,
        "of_fast_runs": of_fast_runs,
    }
