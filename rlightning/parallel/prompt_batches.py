"""What Lightning does not know when it logs: how many prompts a batch has, and at which step an epoch ends."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from rlightning.argument_checks import CheckedArguments
from rlightning.lightning_internals import epoch_results, results_of
from rlightning.parallel.execution_mode import is_controller
from rlightning.types import Prompt


class PromptBatchModule(CheckedArguments, LightningModule):
    """A module that gets lists of prompts: what it and its callbacks log for an epoch is weighted by their number."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log a metric; ``batch_size``, its weight in the mean of an epoch, is by default the number of prompts."""
        # Lightning looks for the first tensor of a batch, and a list of prompts has none.
        results = results_of(self)
        batch = None if results is None else results.batch
        is_listed = isinstance(batch, list) and all(isinstance(entry, Prompt) for entry in batch)
        if batch is not None and is_listed and kwargs.get("batch_size") is None:
            kwargs["batch_size"] = len(batch)
        super().log(*args, **kwargs)


def log_epoch_step(trainer: Trainer, module: LightningModule) -> None:
    """Log ``step``, the loggers' x-axis, with the metrics of an epoch that is over, if there are any.

    Lightning counts from 0 where it has to number them itself: they would stand one step before those of the last step.
    """
    results = epoch_results(trainer)
    if trainer.loggers and any(metric.meta.on_epoch and metric.meta.logger for _, metric in results.valid_items()):
        module.log("step", float(trainer.global_step))


class EpochStep(Callback):
    """Logs the step of an epoch's metrics. It stands behind the callbacks that log any."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before the module's own, which may be the first to log something."""
        log_epoch_step(trainer, pl_module)
        if trainer.loggers and not is_controller() and is_overridden("on_train_epoch_end", pl_module, LightningModule):
            pl_module.log("step", float(trainer.global_step))
