"""What Lightning asks of a strategy, as orders to workers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy

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
)
from rlightning.controller.controller_relay import Relay, split_in_order
from rlightning.controller.epoch_metrics import log_epoch_metrics
from rlightning.controller.hook_relay import GLOBAL_GROUPS
from rlightning.controller.rtensor import localize
from rlightning.controller.worker_group import WorkerGroup
from rlightning.errors import ConfigError
from rlightning.hooks import fire
from rlightning.parallel.checkpoint_io import AtomicCheckpointIO
from rlightning.parallel.execution_mode import ExecutionMode


class ControllerStrategy(SingleDeviceStrategy):
    """The strategy of a process without a device: each step is an order to a group of workers.

    Attributes:
        group: the workers, while there are any.
    """

    execution_mode = ExecutionMode.CONTROLLER

    def __init__(self) -> None:
        super().__init__("cpu")
        self.group: WorkerGroup | None = None
        self._trainer: Trainer | None = None
        self.worker_callbacks: list[Callback] = []
        self._is_started = False
        self._closed_hook: str | None = None  # that is being fired, if no order can be answered in it

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
        self.order_all(Save(checkpoint, str(Path(filepath).absolute()), storage_options))

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
