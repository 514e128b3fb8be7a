"""Says once whether the trainer knows which tokens top-p, top-k and min-p have left of the sampler's distributions."""

import logging

import numpy as np

from rlightning.environments.policy import TRUNCATED
from rlightning.rollout.sampler import MAX_SUPPORT, Sampling
from rlightning.types import RolloutBatch, Sample, Trajectory

log = logging.getLogger(__name__)


class SupportsReport:
    """Warns of the first rollout in which the supports of truncated distributions are unknown.

    Args:
        sampling: the run's sampling parameters.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._has_warned = self._has_described = False

    def report(self, batch: RolloutBatch) -> None:
        """Warn if the trainer does not know the supports of some truncated distributions.

        If it knows them, log once that without top-k fewer tokens are sampled from than top-p and min-p allow.
        """
        if self._has_warned:
            return
        samples = [sample for one in batch.trajectories for sample in self._truncated_samples(one)]
        sizes = np.concatenate([np.zeros(0), *(one.supports.sizes for one in samples if one.supports is not None)])
        num_sampled = sum(len(one.token_ids) for one in samples)
        num_unknown = num_sampled - np.count_nonzero(sizes)
        if not num_unknown:
            if not self._has_described and any(map(self._is_limited, batch.trajectories)):
                self._has_described = True
                log.info(
                    "top_p and min_p leave the %d likeliest tokens at most: the trainer's distributions are cut as the "
                    "sampler's were, by tokens that come with each sample.",
                    MAX_SUPPORT,
                )
            return
        self._has_warned = True
        reason = f"{num_unknown} of {num_sampled} tokens were drawn from more than {MAX_SUPPORT} tokens each"
        log.warning(
            "%s: what top_p, top_k and min_p cut off is unknown to the trainer there, and the gap between its "
            "distributions and the sampler's will not be 0. Consider model.rollout_correction%s.",
            reason if len(sizes) else "The sampler returns no Sample.supports",
            f", or rollout.top_k={MAX_SUPPORT}" if len(sizes) else "",
        )

    def _truncated_samples(self, trajectory: Trajectory) -> list[Sample]:
        """Return the samples of a trajectory whose distributions were truncated.

        Where requests changed what truncates them, only the number of truncated turns is known: without supports, any
        samples stand for them.
        """
        own = trajectory.metrics.get(TRUNCATED)
        if own is None:
            return trajectory.samples if self._sampling.of(trajectory.prompt).is_truncated else []
        known = [sample for sample in trajectory.samples if sample.supports is not None]
        others = [sample for sample in trajectory.samples if sample.supports is None]
        return known + others[: max(0, int(own) - len(known))]

    def _is_limited(self, trajectory: Trajectory) -> bool:
        """Return whether ``MAX_SUPPORT`` stands in for a missing top-k in turns of a trajectory."""
        if TRUNCATED not in trajectory.metrics:
            return self._sampling.of(trajectory.prompt).is_truncated and not self._sampling.top_k
        supports = [sample.supports for sample in trajectory.samples if sample.supports is not None]
        return any(MAX_SUPPORT in one.sizes for one in supports)  # the top-k that a request has is unknown
