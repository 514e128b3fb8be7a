"""What needs attributes of Lightning that are private to it."""

from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from rlightning.parallel.barrier import barrier


class DataPreparation:
    """Has ``prepare_data`` run on one process a host, while the others wait at a barrier with a name and a timeout.

    In the Trainer's own, whose place it takes, they wait on a group of their own for 27 years.

    Args:
        trainer: one that has not prepared its data yet.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        trainer._data_connector.prepare_data = self.run  # type: ignore[method-assign]

    def run(self) -> None:
        """Prepare the data module's data, then the module's."""
        trainer: Any = self._trainer
        for owner in (trainer.datamodule, trainer.lightning_module):
            if owner is None or not is_overridden("prepare_data", owner):
                continue
            if trainer.local_rank == 0 and (owner.prepare_data_per_node or trainer.node_rank == 0):
                with trainer.profiler.profile(f"{type(owner).__name__}.prepare_data"):
                    owner.prepare_data()
            barrier("prepare_data")


def validate_in_fit(trainer: Trainer) -> list[Any]:
    """Run validation as Lightning does between two training batches.

    Lightning's own run before training is a sanity check, whose results it throws away.

    Returns:
        Metrics by name, a dictionary a set.
    """
    with torch.no_grad():
        trainer.validating = True
        metrics = trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True
    return list(metrics)
