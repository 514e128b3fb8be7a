"""Counts the failed and timed-out trajectories of a step: too many failures, or none left, end the run."""

from collections.abc import Mapping, Sequence
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
        time_limits: the run's limits on a trajectory's time in seconds, by configuration key; None if trajectories that
            have timed out count as sampled.
        num_expected: number of trajectories, including those that have not ended.
        num_failed: number of failed trajectories.
        num_timeouts: number of trajectories that have timed out.
        gap: between recorded and verified log-probabilities, if trajectories are verified.
    """

    max_failed_share: float = 1.0
    time_limits: Mapping[str, float] | None = None
    num_expected: int = 0
    num_failed: int = 0
    num_timeouts: int = 0
    gap: Gap = field(default_factory=Gap)
    _first_timeout: str = ""

    def next_step(self) -> "EnvironmentTotals":
        """Return new totals with the same limits."""
        return EnvironmentTotals(self.max_failed_share, self.time_limits)

    def count(self, trajectories: Sequence[Trajectory], first_failure: tuple[str, str] | None) -> None:
        """Count failures and timeouts among ``trajectories``; raise an error if too many have failed.

        Args:
            first_failure: the step's first error in one line, and its traceback; None if unknown.

        Raises:
            EnvironmentFailedError: too many have failed, even if all others succeed.
        """
        failed = [one for one in trajectories if one.status == "failed"]
        late = [one for one in trajectories if one.status == "timeout"]
        self.num_failed += len(failed)
        self.num_timeouts += len(late)
        self._first_timeout = self._first_timeout or next((one.error for one in late if one.error), "")
        if failed and self.num_failed > self.max_failed_share * self.num_expected:
            line, details = first_failure or (failed[0].error or "", "")
            raise EnvironmentFailedError(
                f"At least {self.num_failed} of the {self.num_expected} trajectories of the step failed, more than "
                f"rollout.max_failed_share={self.max_failed_share:g} allows. The first failure: {cut_line(line)}",
                cut(details),
            )

    def describe_timeouts(self) -> str | None:
        """Return an error's message if none of the step's trajectories is left: all have timed out, or some of them,
        and all others have failed. None otherwise, or if any number may time out or fail. The step's refills must
        have been counted.
        """
        is_nothing_left = self.num_failed + self.num_timeouts == self.num_expected
        if not self.num_timeouts or not is_nothing_left or self.time_limits is None or self.max_failed_share >= 1:
            return None
        others = f" {self.num_failed} failed." if self.num_failed else ""
        number = f"{self.num_timeouts} of the" if self.num_failed else "All"
        keys = " or ".join(f"{key}={seconds:g}" for key, seconds in self.time_limits.items())
        raised = f"Raise {keys}, or a limit of the environment's own" if keys else "Raise the environment's own limit"
        return (
            f"{number} {self.num_expected} trajectories of the step timed out, so that none was sampled.{others} The "
            f"first one: {cut_line(self._first_timeout or 'it names no reason.')} {raised}, if the environment needs "
            "longer; model.count_timeouts: true trains on such trajectories."
        )

    def metrics(self, num_requeues: int) -> dict[str, float]:
        """Return the totals as metrics, by the names of docs/metrics.md."""
        metrics = {"environment/requeues": float(num_requeues)}
        if self.gap.num_tokens:
            metrics["environment/verify_gap"] = self.gap.mean
        return metrics
