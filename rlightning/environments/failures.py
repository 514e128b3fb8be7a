"""Counts the failed trajectories of a step, and raises an error if their share is too large."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlightning.environments.verification import Gap
from rlightning.errors import EnvironmentFailedError
from rlightning.foreign_text import cut, cut_line
from rlightning.types.trajectory import Trajectory


@dataclass
class EnvironmentTotals:
    """Counts over all trajectories of a step, on all ranks and including refills.

    Attributes:
        max_failed_share: maximum share of trajectories that may fail for reasons of infrastructure.
        num_expected: number of trajectories, including those that have not ended.
        num_failed: number of failed trajectories.
        gap: between recorded and verified log-probabilities, if trajectories are verified.
    """

    max_failed_share: float = 1.0
    num_expected: int = 0
    num_failed: int = 0
    gap: Gap = field(default_factory=Gap)

    def count(self, trajectories: Sequence[Trajectory], first_failure: tuple[str, str] | None) -> None:
        """Add the number of failed ``trajectories`` to ``num_failed``; raise an error if it exceeds the step's limit.

        Args:
            first_failure: the step's first error in one line, and its traceback; None if unknown.

        Raises:
            EnvironmentFailedError: too many have failed, even if all others succeed.
        """
        failed = [one for one in trajectories if one.status == "failed"]
        self.num_failed += len(failed)
        if not failed or self.num_failed <= self.max_failed_share * self.num_expected:
            return
        line, details = first_failure or (failed[0].error or "", "")
        raise EnvironmentFailedError(
            f"At least {self.num_failed} of the {self.num_expected} trajectories of the step failed, more than "
            f"rollout.max_failed_share={self.max_failed_share:g} allows. The first failure: {cut_line(line)}",
            cut(details),
        )

    def metrics(self, num_requeues: int) -> dict[str, float]:
        """Return the totals as metrics, by the names of docs/metrics.md."""
        metrics = {"environment/requeues": float(num_requeues)}
        if self.gap.num_tokens:
            metrics["environment/verify_gap"] = self.gap.mean
        return metrics
