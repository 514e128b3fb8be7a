"""``prepare_data`` runs on one process a host, and the others wait for it at a barrier with a name and a timeout."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from rlightning.parallel.barrier import barrier


class DataPreparation:
    """Takes the place of the Trainer's own, where the others wait on a group of their own for 27 years.

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
