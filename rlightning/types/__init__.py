"""The data of a training step: prompts, trajectories, and the packed batch that the update reads."""

from typing import TYPE_CHECKING

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


def __getattr__(name: str) -> object:
    """Import names that need torch on first access: workers of environments run without torch."""
    if name in ("LossTotals", "RolloutBatch"):
        from rlightning.types.batch import LossTotals, RolloutBatch

        return LossTotals if name == "LossTotals" else RolloutBatch
    if name == "axis":
        from rlightning.types.axes import axis

        return axis
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
