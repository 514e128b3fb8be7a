"""The data of a training step: prompts, trajectories, and the packed batch that the update reads."""

from pkgutil import resolve_name
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


_FILES = {"LossTotals": "batch", "RolloutBatch": "batch", "axis": "axes"}


def __getattr__(name: str) -> object:
    """Import names that need torch on first access: workers of environments run without torch."""
    if name in _FILES:
        return resolve_name(f"{__name__}.{_FILES[name]}:{name}")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
