"""AdamW, with its moments as it computes with them, in fewer bytes, or in the host's memory."""

from rlightning.optimizers.adamw import StoredMomentsAdamW
from rlightning.optimizers.moments import OptimizerStates

__all__ = ["OptimizerStates", "StoredMomentsAdamW"]
