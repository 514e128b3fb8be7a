"""What travels through a step: prompts in, completions out, and the packed batch that the update reads."""

from rlightning.types.batch import LossTotals, RolloutBatch
from rlightning.types.trajectory import Completion, Prompt

__all__ = ["Completion", "LossTotals", "Prompt", "RolloutBatch"]
