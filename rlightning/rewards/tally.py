"""Converts the outcomes of reward calls to scores, and limits how many samples may fail."""

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from rlightning.errors import RewardError
from rlightning.rewards.calls import RewardResult, error_line
from rlightning.rewards.config import BoundReward

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

MAX_REWARD = 1e12
"""Largest absolute reward. Without normalization, advantages and gradients are of the same size, and the sum of squares
in the gradient's norm overflows float32 beyond some 1e18, so that the step would be skipped."""


class RewardScores(NamedTuple):
    """The rewards of ``N`` samples, and each reward function's scores, of which the rewards are weighted sums.

    Attributes:
        rewards: [N] float64, the weighted sums; NaN where a function failed, or none applied.
        components: [N] float64 for each function by its name: unweighted scores, NaN where the function gave none.
        failed: number of NaNs in ``rewards``.
    """

    rewards: "Tensor"
    components: "dict[str, Tensor]"
    failed: int

    def by_sample(self) -> "list[dict[str, float | None]]":
        """Return each sample's scores by function name, [N]; None where the function gave none."""
        columns = {name: scores.tolist() for name, scores in self.components.items()}
        rows = zip(*columns.values(), strict=True)
        return [
            {name: None if math.isnan(score) else score for name, score in zip(columns, row, strict=True)}
            for row in rows
        ]


class FailureCount:
    """Counts the samples without a reward, over a step or over a validation set.

    Args:
        num_samples: minimum number of samples, over all ranks.
        max_share: maximum share of samples that may fail.
        of: text that follows "samples" in the error, such as " of the step".

    Attributes:
        num_scored: number of scored samples of this rank.
        num_failed: number of scored samples without a reward.
    """

    def __init__(self, num_samples: int, max_share: float, of: str = "") -> None:
        self.num_samples = num_samples
        self.max_share = max_share
        self.of = of
        self.num_scored = self.num_failed = 0
        self._first: tuple[str, str] | None = None

    def add(self, name: str, sample: int, error: str) -> None:
        """Count a sample as failed, because of ``error`` in the function ``name``.

        Raises:
            RewardError: too many samples have failed, even without failures on other ranks.
        """
        self.num_failed += 1
        if self._first is None:
            self._first = f"The first failure, of '{name}' on sample {sample}: {error_line(error)}", error
        self.check(self.num_failed, max(self.num_samples, self.num_scored), at_least="at least ")

    def check(self, num_failed: int, num_samples: int, *, at_least: str = "") -> None:
        """Raise a RewardError if the number of failures on all ranks exceeds the limit.

        Args:
            at_least: text before the number of failures if there may be more.
        """
        if num_failed > self.max_share * num_samples:
            count = f"{at_least}{num_failed} of {num_samples} samples{self.of} have no reward"
            first, trace = self._first or ("Other ranks have logged the failures.", "")
            raise RewardError(f"{count}, more than max_failed_share={self.max_share:g} allows. {first}", trace)


class Tally:
    """Collects the results of the reward functions for one batch of ``num_samples``.

    Args:
        reported: names of the functions of which a failure has been logged; each is logged only once.
    """

    def __init__(
        self, functions: Sequence[BoundReward], num_samples: int, failures: FailureCount, reported: set[str]
    ) -> None:
        self.functions = functions
        self.values: list[list[float | None]] = [[None] * num_samples for _ in functions]
        self.num_samples = num_samples
        self.failures = failures
        self.reported = reported
        self.failed: set[int] = set()
        failures.num_scored += num_samples

    def add(self, function: int, sample: int, outcome: RewardResult) -> None:
        """Record the result of a function for a sample; raises a RewardError if there are too many failures."""
        if outcome.error is None:
            self.values[function][sample] = outcome.value
        else:
            self._fail(sample, self.functions[function].name, outcome.error)

    def total(self) -> RewardScores:
        """Return the rewards and scores of all samples; called after every result has been added.

        A sample counts as failed if no function applies to it, or its weighted sum is too large.

        Raises:
            RewardError: too many samples have failed.
        """
        import torch

        for sample in range(self.num_samples):
            if sample not in self.failed and all(values[sample] is None for values in self.values):
                error = "ValueError: no reward function applies to the sample: all gave None"
                self._fail(sample, "every function", error)
        totals = [self._weighted_sum(sample) for sample in range(self.num_samples)]
        for sample, total in enumerate(totals):
            if sample not in self.failed and not abs(total) <= MAX_REWARD:
                self._fail(sample, "the weighted sum", f"ValueError: {_too_large(total)}")
        rewards = torch.tensor(totals, dtype=torch.float64)
        rewards[sorted(self.failed)] = float("nan")
        components = {
            function.name: torch.tensor([float("nan") if v is None else v for v in values], dtype=torch.float64)
            for function, values in zip(self.functions, self.values, strict=True)
        }
        return RewardScores(rewards, components, len(self.failed))

    def _weighted_sum(self, sample: int) -> float:
        """Return the weighted sum of a sample's scores in float64; float32 would round equal sums differently."""
        pairs = zip(self.functions, self.values, strict=True)
        return sum((function.weight * (values[sample] or 0.0) for function, values in pairs), 0.0)

    def _fail(self, sample: int, name: str, error: str) -> None:
        if name not in self.reported:
            self.reported.add(name)
            logger.warning("Reward '%s' failed on a sample, which is left out; logged only once:\n%s", name, error)
        if sample not in self.failed:
            self.failed.add(sample)
            self.failures.add(name, sample, error)


def fail_too_large(rewards: "Tensor") -> "Tensor":
    """Return rewards [N] with NaN, which counts as a failure, for each that is beyond :data:`MAX_REWARD`; log how many.

    Used for the rewards of an overridden ``compute_rewards``; :class:`Tally` checks those of reward functions.
    """
    is_too_large = rewards.abs() > MAX_REWARD
    if not is_too_large.any():
        return rewards
    first = _too_large(rewards[is_too_large][0].item())
    logger.warning("compute_rewards: %s. Such samples are left out, %d of this batch.", first, int(is_too_large.sum()))
    return rewards.masked_fill(is_too_large, float("nan"))


def _too_large(reward: float) -> str:
    return f"a reward of {reward:g} is beyond {MAX_REWARD:g}, and its gradient's norm beyond float32"
