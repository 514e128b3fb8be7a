"""A Lightning strategy whose steps are commands to workers; its launcher repeats a stage after a worker has died."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from rlightning.atomic_save import find_saved
from rlightning.controller.cluster import check_own_node
from rlightning.controller.commands import (
    Call,
    Command,
    End,
    EndEpoch,
    Entry,
    Evaluate,
    EvaluateBatch,
    HookCall,
    Load,
    PromptRequest,
    Save,
    StepResult,
    StopRequest,
    Train,
    WorkerDiedError,
)
from rlightning.controller.epoch_metrics import log_epoch_metrics
from rlightning.controller.hook_relay import GLOBAL_GROUPS, Relay, split_in_order
from rlightning.controller.rtensor import fetch_tensors
from rlightning.controller.worker_group import WorkerGroup
from rlightning.errors import ConfigError
from rlightning.hooks import call_hook
from rlightning.lightning_internals import Launcher, given_checkpoint_io, teardown, without_cuda_rng
from rlightning.parallel.checkpoint import LoadsByItself
from rlightning.parallel.checkpoint_io import AtomicCheckpointIO, is_whole
from rlightning.parallel.execution_mode import ExecutionMode
from rlightning.processes.liveness import RestartPolicy

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")


class ControllerStrategy(LoadsByItself, SingleDeviceStrategy):
    """The strategy of a process without a device: each step is sent as a command to a group of workers.

    Attributes:
        weight_version: weight version of the workers' actor.
        saved: paths of this run's checkpoints, in order; a restart continues from the last of them.
    """

    execution_mode = ExecutionMode.CONTROLLER
    max_restarts = 0

    def __init__(self) -> None:
        super().__init__("cpu")
        self.group: WorkerGroup | None = None
        self.trainer: Trainer
        self.saved: list[Path] = []
        self.weight_version = 0
        self.worker_callbacks: list[Callback] = []
        self._is_started = False
        self._closed_hook: str | None = None  # the hook being called, if commands cannot be answered in it

    @property
    def workers(self) -> WorkerGroup:
        """The worker group, once it has been started."""
        assert self.group is not None
        return self.group

    def count_workers(self) -> int:
        """Return the number of workers, before or after they are started."""
        raise NotImplementedError

    # Commands

    def execute_each(self, commands: Sequence[Command[R]]) -> list[R]:
        """Send each worker its command, call here the hooks that it relays, wait, and return the results by rank.

        Raises a ConfigError in a hook in which workers take no commands.
        """
        if self._closed_hook is not None:
            raise refusal(commands[0], self._closed_hook)
        relay = Relay(self.workers.num_workers, self._run_hook)

        def handle(rank: int, entry: Entry) -> None:
            if isinstance(entry, HookCall):
                relay.add(rank, entry)
            elif isinstance(entry, PromptRequest) and rank == 0:
                self._supply(entry.num_prompts)
            elif isinstance(entry, StopRequest):
                self.trainer.should_stop = True

        answers = self.workers.execute(commands, handle)
        relay.flush()
        return answers

    def execute_all(self, command: Command[R]) -> list[R]:
        """Send the same command to all workers, wait, and return the results by rank."""
        return self.execute_each([command] * self.workers.num_workers)

    def call(self, method: str, *arguments: object, **named: object) -> Any:
        """Call a method of the module in all workers, wait, and return rank 0's result, with tensors on this host."""
        return fetch_tensors(self.execute_all(Call(method, arguments, named))[0])

    def _supply(self, num_prompts: int) -> None:
        """Send each worker ``num_prompts`` further prompts of the training set."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        self.workers.supply(split_in_order(data.take(num_prompts * self.workers.num_workers), self.workers.num_workers))

    def _run_hook(self, call: HookCall, arguments: Sequence[object]) -> None:
        """Call a worker's RL hook on the callbacks in the controller."""
        self.weight_version = call.weight_version
        self._count_steps(call.global_step)
        # Before its update a step may wait for further prompts, while a command would wait for the step.
        is_closed = self.trainer.training and call.hook not in GLOBAL_GROUPS
        self._closed_hook = call.hook if is_closed else None
        try:
            call_hook(self.trainer, self.lightning_module, call.hook, *arguments)
        finally:
            self._closed_hook = None

    def _count_steps(self, global_step: int) -> None:
        """Advance the Trainer's count of optimizer steps to that of the workers."""
        if self.trainer.state.fn == "fit":
            progress = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
            for _ in range(global_step - progress.total.completed):
                progress.increment_ready()
                progress.increment_completed()

    # Methods of Lightning's strategies

    def training_step(self, batch: Sequence[object], batch_idx: int) -> None:
        """Have the workers train on a batch, split in order over the ranks, and log the metrics that they return."""
        shares = split_in_order(batch, self.workers.num_workers)
        is_last = self.trainer.is_last_batch
        self._log(self.execute_each([Train(share, is_last) for share in shares]))

    def end_epoch(self) -> None:
        """Log the metrics that the workers' hooks logged at the end of an epoch."""
        self._log(self.execute_all(EndEpoch()))

    def _log(self, results: Sequence[StepResult]) -> None:
        module, first = self.lightning_module, results[0]
        assert module is not None
        self._count_steps(first.global_step)
        for name, value in first.metrics.items():
            module.log(name, value, logger=name in first.in_logger, prog_bar=name in first.in_progress_bar)
        log_epoch_metrics(module, [result.epoch_metrics for result in results])

    def validation_step(self, batch: Sequence[object], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Have the n workers evaluate a batch, each every n-th element; metrics are logged at the validation's end."""
        self._evaluate_batch(batch, dataloader_idx)

    test_step = validation_step

    def predict_step(self, batch: Sequence[object], batch_idx: int, dataloader_idx: int = 0) -> list[object]:
        """Return the predictions for a batch, in its order; each of the n workers predicts every n-th element."""
        parts = fetch_tensors(self._evaluate_batch(batch, dataloader_idx))
        merged: list[object] = [None] * len(batch)
        for rank, part in enumerate(parts):
            merged[rank :: len(parts)] = part
        return merged

    def _evaluate_batch(self, batch: Sequence[object], loader: int) -> list[object]:
        ranks = self.workers.num_workers
        return self.execute_each([EvaluateBatch(batch[rank::ranks], loader) for rank in range(ranks)])

    def on_validation_start(self) -> None:
        """Start the validation in the workers."""
        self._start_evaluation(len(self.trainer.num_val_batches))

    def on_test_start(self) -> None:
        """Start the test in the workers."""
        self._start_evaluation(len(self.trainer.num_test_batches))

    def on_predict_start(self) -> None:
        """Start the prediction in the workers."""
        self._start_evaluation(len(self.trainer.num_predict_batches))

    def _start_evaluation(self, num_sets: int) -> None:
        self.execute_all(Evaluate(num_sets, is_sanity_check=self.trainer.sanity_checking))

    def on_train_end(self) -> None:
        """End the workers' fits; called after all checkpoints are saved."""
        self.execute_all(End())
        self._await_end()

    def on_validation_end(self) -> None:
        """Wait for the end of the stage in the workers, unless it is part of a fit; called after metrics are logged."""
        if self.trainer.state.fn != "fit":
            self._await_end()

    on_test_end = on_predict_end = on_validation_end

    def _await_end(self) -> None:
        self.workers.await_end()
        self._is_started = False

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        """Return an empty state: the workers add their weights when a checkpoint is written."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, object], filepath: str | Path, storage_options: object = None
    ) -> None:
        """Have the workers write a checkpoint in their strategy's format, which a run without a controller can load.

        The controller's part contains loops, callbacks and the position in the data.
        """
        path = Path(filepath).absolute()
        self.execute_all(Save(checkpoint, str(path), storage_options))
        if "optimizer_states" in checkpoint:  # otherwise the checkpoint contains only weights
            self.saved.append(path)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, object]:
        """Have the workers load their part of a checkpoint, and return the controller's part."""
        loaded = self.execute_all(Load(str(Path(checkpoint_path).absolute()), weights_only))[0]
        theirs = {callback.state_key for callback in self.worker_callbacks}
        callbacks = {key: state for key, state in loaded.get("callbacks", {}).items() if key not in theirs}
        self.weight_version = loaded.get("weight_version", 0)
        return {**loaded, "callbacks": callbacks, "lr_schedulers": []}

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint's file or folder, which the workers wrote."""
        (given_checkpoint_io(self) or AtomicCheckpointIO()).remove_checkpoint(filepath)

    def model_to_device(self) -> None:
        """Do nothing: this process has no model."""


def refusal(command: Command[object], hook: str) -> ConfigError:
    """Return the error for a command that is sent in ``hook``: workers execute none then, so it would deadlock."""
    name = type(command).__name__
    what = f"trainer.strategy.call({command.method!r})" if isinstance(command, Call) else f"a command to {name.lower()}"
    return ConfigError(
        f"{what} came in {hook}, but until its update the workers' step may ask for further prompts, and takes no "
        "commands. Do it in on_update_start, on_update_end, or a hook of Lightning's such as on_train_batch_end."
    )


CKPT_PATH = 4
"""Index of the checkpoint in the arguments of Lightning's fit: module, two loaders, data, checkpoint ..."""


class ControllerLauncher(Launcher):
    """A launcher that starts no process, because the strategy starts the workers."""

    def __init__(self, strategy: ControllerStrategy) -> None:
        self.strategy = strategy

    @property
    def is_interactive_compatible(self) -> bool:
        """True: a controller can run in a notebook."""
        return True

    def launch(self, function: Callable[..., T], *args: object, trainer: Trainer | None = None, **kwargs: object) -> T:
        """Run ``function``, a stage of Lightning's; if a worker dies in a fit, repeat it from the last checkpoint.

        At most ``max_restarts`` times; returns the function's result.
        """
        self.strategy.saved.clear()
        budget = RestartPolicy(self.strategy.max_restarts)
        with without_cuda_rng(), naming_lost_cluster():
            while True:
                try:
                    return function(*args, **kwargs)
                except WorkerDiedError as error:
                    check_own_node()
                    if trainer is None or trainer.state.fn != "fit":
                        raise
                    path = find_last(self.strategy.saved) or args[CKPT_PATH]
                    if path is None or not budget.take():
                        raise
                    used, allowed = budget.num_restarts, budget.max_restarts
                    log.warning("%s Restart %d of %d, from %s.", str(error), used, allowed, path)
                    teardown(trainer)  # ends the interrupted stage; callbacks are not called
                    trainer.training = True
                    args = (*args[:CKPT_PATH], str(path), *args[CKPT_PATH + 1 :])

    def kill(self, signum: int) -> None:
        """Do nothing: workers end with this process."""


@contextmanager
def naming_lost_cluster() -> Iterator[None]:
    """Context manager that raises a ClusterLostError in place of any error if the run's own Ray cluster has ended."""
    try:
        yield
    except Exception:
        check_own_node()
        raise


def find_last(saved: Sequence[Path]) -> Path | None:
    """Return the newest of the saved checkpoints that is complete and still exists."""
    return next(filter(is_whole, map(find_saved, reversed(saved))), None)
