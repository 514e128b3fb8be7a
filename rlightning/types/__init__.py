"""The data of a training step: prompts, trajectories, and the packed batch that the update reads."""

from typing import TYPE_CHECKING

from rlightning.lazy import lazy_import
from rlightning.types.trajectory import (
    AgentTrace,
    Branch,
    BranchReason,
    Outcome,
    Prompt,
    Sample,
    Status,
    Trajectory,
    Turn,
    single_turns,
)

if TYPE_CHECKING:
    from rlightning.types.axes import axis
    from rlightning.types.batch import LossTotals, RolloutBatch

__all__ = [
    "AgentTrace",
    "Branch",
    "BranchReason",
    "LossTotals",
    "Outcome",
    "Prompt",
    "RolloutBatch",
    "Sample",
    "Status",
    "Trajectory",
    "Turn",
    "axis",
    "single_turns",
]

# These names need torch: workers of environments run without torch.
__getattr__ = lazy_import(__name__, {"LossTotals": "batch", "RolloutBatch": "batch", "axis": "axes"})
