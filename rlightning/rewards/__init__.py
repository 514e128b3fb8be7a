"""Reward functions, and the runner that calls them: if a call hangs or crashes, only its sample gets no reward.

Worker processes import this package too, so that torch is imported only in :meth:`RewardRunner.score`.
"""

from typing import TYPE_CHECKING

from rlightning.rewards.config import Reward, RewardFunction
from rlightning.rewards.functions import exact_match, length_penalty, regex_format
from rlightning.rewards.references import answer_checker
from rlightning.rewards.runner import RewardRunner
from rlightning.rewards.tally import FailureCount, RewardScores

if TYPE_CHECKING:
    from rlightning.rewards.numeric import numeric_answer

__all__ = [
    "FailureCount",
    "Reward",
    "RewardFunction",
    "RewardRunner",
    "RewardScores",
    "answer_checker",
    "exact_match",
    "length_penalty",
    "numeric_answer",
    "regex_format",
]


def __getattr__(name: str) -> object:
    """Import ``numeric_answer`` when it is first accessed: importing sympy and its parsers is slow."""
    if name == "numeric_answer":
        from rlightning.rewards.numeric import numeric_answer

        return numeric_answer
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
