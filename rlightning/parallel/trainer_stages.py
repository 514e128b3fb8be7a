"""Changes to stages of Lightning's Trainer: data preparation, validation within a fit, exceptions in an evaluation."""

from typing import Protocol

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from rlightning.lightning_internals import replace_prepare_data, restore_module_modes
from rlightning.parallel.barrier import barrier


class ValidatesFirst(Protocol):
    """A module with a setting, ``validate_first``: whether a validation runs before the first training step."""

    validate_first: bool


def prepare_data_at_barrier(trainer: Trainer) -> None:
    """Have the Trainer run ``prepare_data`` on one process, of the run or each host; others wait at a named barrier.

    This replaces the Trainer's own method, whose barrier has a timeout of 27 years.
    """

    def prepare() -> None:
        profiler: Profiler = trainer.profiler  # type: ignore[attr-defined]
        datamodule: LightningDataModule | None = trainer.datamodule  # type: ignore[attr-defined]
        for owner in (datamodule, trainer.lightning_module):
            if owner is None or not is_overridden("prepare_data", owner):
                continue
            if trainer.local_rank == 0 and (owner.prepare_data_per_node or trainer.node_rank == 0):
                with profiler.profile(f"{type(owner).__name__}.prepare_data"):
                    owner.prepare_data()
            barrier("prepare_data")

    replace_prepare_data(trainer, prepare)


class LeaveEvaluation(Callback):
    """A callback that restores each submodule's ``train()`` or ``eval()`` mode when an exception ends an evaluation."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore each module's mode from before the current evaluation, if there is one."""
        restore_module_modes(trainer, pl_module)


def validate_in_fit(trainer: Trainer) -> list[dict[str, Tensor]]:
    """Run validation within a fit, as between two training batches; return a dict of metrics for each set.

    Lightning's own validation before training is a sanity check, whose results are dropped.
    """
    with torch.no_grad():
        trainer.validating = True
        metrics = trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True
    return list(metrics)
