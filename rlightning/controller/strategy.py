"""What Lightning asks of a strategy, as orders to workers; and its launcher, which restarts a stage after a death."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch.trainer.trainer as trainer_module
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.utilities.seed import isolate_rng

from rlightning.atomic_save import find_saved
from rlightning.controller.cluster import check_own_node
from rlightning.controller.commands import (
    Call,
    End,
    EndEpoch,
    Entry,
    Evaluate,
    EvaluateBatch,
    Fired,
    Load,
    Order,
    PromptsWanted,
    Save,
    StepResult,
    StopWanted,
    Train,
    WorkerDiedError,
)
from rlightning.controller.epoch_metrics import log_epoch_metrics
from rlightning.controller.hook_relay import GLOBAL_GROUPS, Relay, split_in_order
from rlightning.controller.rtensor import localize
from rlightning.controller.worker_group import WorkerGroup
from rlightning.errors import ConfigError
from rlightning.hooks import fire
from rlightning.parallel.checkpoint_io import AtomicCheckpointIO, is_whole
from rlightning.parallel.execution_mode import ExecutionMode


class ControllerStrategy(SingleDeviceStrategy):
    """The strategy of a process without a device: each step is an order to a group of workers.

    Attributes:
        group: the workers, while there are any.
        max_restarts: how often workers are started anew when one of them has died.
        saved: the checkpoints of this run, in order; a restart goes on from the last, not from others beside them.
    """

    execution_mode = ExecutionMode.CONTROLLER
    max_restarts = 0

    def __init__(self) -> None:
        super().__init__("cpu")
        self.group: WorkerGroup | None = None
        self.saved: list[Path] = []
        self._trainer: Trainer | None = None
        self.worker_callbacks: list[Callback] = []
        self._is_started = False
        self._closed_hook: str | None = None  # that is being fired, if no order can be answered in it

    def count_workers(self) -> int:
        """Return how many workers there are, or will be."""
        raise NotImplementedError

    # Orders

    def order_each(self, orders: Sequence[Order]) -> list[Any]:
        """Have each worker obey its order, relay the hooks that it fires, and return the answers by rank."""
        assert self.group is not None and self._trainer is not None
        if self._closed_hook is not None:
            raise refusal(orders[0], self._closed_hook)
        relay = Relay(self.group.num_workers, self._fire)

        def heed(rank: int, entry: Entry) -> None:
            if isinstance(entry, Fired):
                relay.add(rank, entry)
            elif isinstance(entry, PromptsWanted) and rank == 0:
                self._supply(entry.num_prompts)
            elif isinstance(entry, StopWanted) and self._trainer is not None:
                self._trainer.should_stop = True

        answers = self.group.order(orders, heed)
        relay.flush()
        return answers

    def order_all(self, order: Order) -> list[Any]:
        """Have all workers obey the same order."""
        assert self.group is not None
        return self.order_each([order] * self.group.num_workers)

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the module in all workers; what it returned on rank 0, with its tensors on this host."""
        return localize(self.order_all(Call(method, arguments, named))[0])

    def _supply(self, num_prompts: int) -> None:
        """Further prompts from the data module, so many for each worker."""
        assert self.group is not None and self._trainer is not None
        data: Any = self._trainer.datamodule  # type: ignore[attr-defined]
        self.group.supply(split_in_order(data.take(num_prompts * self.group.num_workers), self.group.num_workers))

    def _fire(self, fired: Fired, arguments: Sequence[Any]) -> None:
        """Fire a worker's RL hook here."""
        assert self._trainer is not None
        module: Any = self.lightning_module
        module.weight_version = fired.weight_version
        self._count_steps(fired.global_step)
        # Before its update a step may wait for further prompts, and an order behind it would wait for the step.
        is_closed = self._trainer.training and fired.hook not in GLOBAL_GROUPS
        self._closed_hook = fired.hook if is_closed else None
        try:
            fire(self._trainer, module, fired.hook, *arguments)
        finally:
            self._closed_hook = None

    def _count_steps(self, global_step: int) -> None:
        """Count optimizer steps as the workers do."""
        assert self._trainer is not None
        if self._trainer.state.fn == "fit":
            progress = self._trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
            for _ in range(global_step - progress.total.completed):
                progress.increment_ready()
                progress.increment_completed()

    # What Lightning asks a strategy to do

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Train on a batch: neighbouring parts of it go to neighbouring ranks. What their steps return stays there."""
        assert self.group is not None and self._trainer is not None
        shares = split_in_order(batch, self.group.num_workers)
        is_last = self._trainer.is_last_batch
        self._log(self.order_each([Train(share, is_last) for share in shares]))

    def end_epoch(self) -> None:
        """Log what the workers' hooks at the end of an epoch have."""
        self._log(self.order_all(EndEpoch()))

    def _log(self, results: Sequence[StepResult]) -> None:
        module, first = self.lightning_module, results[0]
        assert module is not None
        self._count_steps(first.global_step)
        for name, value in first.metrics.items():
            module.log(name, value, logger=name in first.in_logger, prog_bar=name in first.in_progress_bar)
        log_epoch_metrics(module, [result.epoch_metrics for result in results])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Evaluate a batch: each worker takes every n-th element of it."""
        self._evaluate_batch(batch, dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """As :meth:`validation_step`."""
        self._evaluate_batch(batch, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """As :meth:`validation_step`; the predictions, in the batch's order."""
        parts = localize(self._evaluate_batch(batch, dataloader_idx))
        merged: list[Any] = [None] * len(batch)
        for rank, part in enumerate(parts):
            merged[rank :: len(parts)] = part
        return merged

    def _evaluate_batch(self, batch: Any, loader: int) -> list[Any]:
        assert self.group is not None
        ranks = self.group.num_workers
        return self.order_each([EvaluateBatch(batch[rank::ranks], loader) for rank in range(ranks)])

    def on_validation_start(self) -> None:
        """Called when validation begins."""
        assert self._trainer is not None
        num_loaders = len(self._trainer._evaluation_loop.max_batches)
        self.order_all(Evaluate(num_loaders, is_sanity_check=self._trainer.sanity_checking))

    def on_test_start(self) -> None:
        """Called when a test begins."""
        self.on_validation_start()

    def on_predict_start(self) -> None:
        """Called when prediction begins."""
        assert self._trainer is not None
        self.order_all(Evaluate(len(self._trainer.predict_loop.max_batches)))

    def on_train_end(self) -> None:
        """Called when all has been saved: the workers' fits end."""
        self.order_all(End())
        self._await_end()

    def on_validation_end(self) -> None:
        """Called when the metrics are there."""
        assert self._trainer is not None
        if self._trainer.state.fn != "fit":
            self._await_end()

    on_test_end = on_predict_end = on_validation_end

    def _await_end(self) -> None:
        assert self.group is not None
        self.group.await_end()
        self._is_started = False

    # Checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """There is nothing to load a checkpoint into before the workers are there."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """The workers have done it."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: the workers add theirs when a checkpoint is written."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Have the workers write a checkpoint of both, in their strategy's format, which resumes with or without this.

        Args:
            checkpoint: the controller's part: loops, callbacks, the position in the data.
            filepath: on a disk that all workers see.
            storage_options: of the workers' strategy.
        """
        path = Path(filepath).absolute()
        self.order_all(Save(checkpoint, str(path), storage_options))
        if "optimizer_states" in checkpoint:  # without, there are only weights
            self.saved.append(path)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Have the workers load their part.

        Returns:
            The controller's part.
        """
        loaded: dict[str, Any] = self.order_all(Load(str(Path(checkpoint_path).absolute()), weights_only))[0]
        theirs = {callback.state_key for callback in self.worker_callbacks}
        callbacks = {key: state for key, state in loaded.get("callbacks", {}).items() if key not in theirs}
        module: Any = self.lightning_module
        module.weight_version = loaded.get("weight_version", 0)
        return {**loaded, "callbacks": callbacks, "lr_schedulers": []}

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a file or a folder of the workers'."""
        (self._checkpoint_io or AtomicCheckpointIO()).remove_checkpoint(filepath)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """:meth:`load_checkpoint` has done it."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """:meth:`load_checkpoint` has done it."""

    def model_to_device(self) -> None:
        """There is no model here."""


def refusal(order: Order, hook: str) -> ConfigError:
    """What to raise for an order that could wait for ever."""
    name = type(order).__name__
    what = f"trainer.strategy.call({order.method!r})" if isinstance(order, Call) else f"an order to {name.lower()}"
    return ConfigError(
        f"{what} came in {hook}, but until its update the workers' step may ask for further prompts, and takes no "
        "orders. Do it in on_update_start, on_update_end, or a hook of Lightning's such as on_train_batch_end."
    )


log = logging.getLogger(__name__)

CKPT_PATH = 4
"""The place of the checkpoint in the arguments of Lightning's fit: module, two loaders, data, checkpoint ..."""


class ControllerLauncher(_Launcher):
    """Starts no process; the strategy does.

    Args:
        strategy: of the controller.
    """

    def __init__(self, strategy: ControllerStrategy) -> None:
        self.strategy = strategy

    @property
    def is_interactive_compatible(self) -> bool:
        """Also in a notebook."""
        return True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Run ``function``, Lightning's implementation of a stage."""
        self.strategy.saved.clear()
        with without_cuda_rng(), naming_lost_cluster():
            for restart in range(1, self.strategy.max_restarts + 1):
                try:
                    return function(*args, **kwargs)
                except WorkerDiedError as error:
                    check_own_node()
                    if trainer is None or trainer.state.fn != "fit":
                        raise
                    path = find_last(self.strategy.saved) or args[CKPT_PATH]
                    if path is None:
                        raise
                    log.warning("%s Restart %d of %d, from %s.", str(error), restart, self.strategy.max_restarts, path)
                    prepare_again(trainer)
                    args = with_checkpoint(args, path)
            return function(*args, **kwargs)

    def kill(self, signum: int) -> None:
        """Do nothing: workers end with this process."""


@contextmanager
def naming_lost_cluster() -> Iterator[None]:
    """Within, have whatever Ray raises because the run's own cluster is gone say that."""
    try:
        yield
    except Exception:
        check_own_node()
        raise


@contextmanager
def without_cuda_rng() -> Iterator[None]:
    """Have Lightning leave CUDA's random state alone, which it asks all devices for as a fit begins."""
    trainer_module.isolate_rng = partial(isolate_rng, include_cuda=False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        trainer_module.isolate_rng = isolate_rng  # type: ignore[attr-defined]


def find_last(saved: Sequence[Path]) -> Path | None:
    """The last checkpoint that is whole and still there.

    Args:
        saved: as they were written; what else is beside them may be another run's, or of steps that were rolled back.
    """
    return next(filter(is_whole, map(find_saved, reversed(saved))), None)


def prepare_again(trainer: Trainer) -> None:
    """Undo what a stage that was cut short has begun, for another attempt; callbacks know nothing of it."""
    trainer._teardown()
    trainer.training = True


def with_checkpoint(args: tuple[Any, ...], path: Path | str) -> tuple[Any, ...]:
    """The arguments of Lightning's fit with another checkpoint."""
    return (*args[:CKPT_PATH], str(path), *args[CKPT_PATH + 1 :])
