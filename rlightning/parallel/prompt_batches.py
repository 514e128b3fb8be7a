"""Corrects two defaults of Lightning's logging: the size of a batch of prompts, and the step of epoch metrics."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from rlightning.config.argument_checks import CheckedArguments
from rlightning.lightning_internals import epoch_results, results_of
from rlightning.parallel.execution_mode import is_controller
from rlightning.types import Prompt


class PromptBatchModule(CheckedArguments, LightningModule):
    """A module whose batches are lists of prompts: metrics of an epoch are weighted by the number of prompts."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log a metric; ``batch_size``, its weight in the epoch's mean, defaults to the batch's number of prompts."""
        # Lightning looks for the first tensor of a batch, and a list of prompts has none.
        results = results_of(self)
        batch = None if results is None else results.batch
        is_listed = isinstance(batch, list) and all(isinstance(entry, Prompt) for entry in batch)
        if batch is not None and is_listed and kwargs.get("batch_size") is None:
            kwargs["batch_size"] = len(batch)
        super().log(*args, **kwargs)


def log_epoch_step(trainer: Trainer, module: LightningModule) -> None:
    """Log ``step``, the loggers' x-axis, with an epoch's metrics, if there are any.

    By default Lightning counts from 0, so that an epoch's metrics would appear one step before those of its last step.
    """
    results = epoch_results(trainer)
    if trainer.loggers and any(metric.meta.on_epoch and metric.meta.logger for _, metric in results.valid_items()):
        module.log("step", float(trainer.global_step))


class EpochStep(Callback):
    """A callback that logs the step of an epoch's metrics; it must be listed after the callbacks that log metrics."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the epoch's step; called before the module's own hook, which may log the first metric."""
        log_epoch_step(trainer, pl_module)
        if trainer.loggers and not is_controller() and is_overridden("on_train_epoch_end", pl_module, LightningModule):
            pl_module.log("step", float(trainer.global_step))
