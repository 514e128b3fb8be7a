"""Reward functions, and the runner that calls them: if a call hangs or crashes, only its sample gets no reward.

Worker processes import this package too, so that torch is imported only in :meth:`RewardRunner.score`.
"""

from typing import TYPE_CHECKING

from rlightning.lazy import lazy_import
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

# Importing sympy and its parsers is slow.
__getattr__ = lazy_import(__name__, {"numeric_answer": "numeric"})
