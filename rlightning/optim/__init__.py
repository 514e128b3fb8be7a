"""AdamW whose moments can be stored in float32, in fewer bytes, or in host memory."""

from rlightning.optim.adamw import StoredMomentsAdamW, fetch_all
from rlightning.optim.moments import OptimizerStates

__all__ = ["OptimizerStates", "StoredMomentsAdamW", "fetch_all"]
