"""Weight syncs of a sampler in the trainer's process: rank 0 has the sampler, the other ranks send their shards."""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rlightning.parallel.gathering import gather_into
from rlightning.rollout.canary import VerifiedSampler
from rlightning.rollout.placement import COLLECTOR_RANK
from rlightning.rollout.sampler import Sampler
from rlightning.rollout.weight_sync import RankSamplers, SamplerStates
from rlightning.rollout.weights import WeightSource
from rlightning.rpc.client import LoopThread


class InProcessSampler:
    """Wraps a sampler in this process, so that its weights can be verified as those of an engine are.

    Args:
        sampler: the sampler.
        loop: event loop on which its methods are called.
    """

    is_alive = True

    def __init__(self, sampler: Sampler, loop: LoopThread) -> None:
        self.sampler, self._loop = sampler, loop
        self.is_verified = self.is_proven = False

    @property
    def weight_version(self) -> int | None:
        """The version of the sampler's weights; None if it has none."""
        return self.sampler.weight_version

    @weight_version.setter
    def weight_version(self, version: int | None) -> None:
        self.sampler.weight_version = version

    def score_all(self, token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the log-probabilities [N, L] of sequences [N, L] at temperature 1; 0 for each first token."""

        async def score() -> list[NDArray[np.float32]]:
            return await asyncio.gather(*(self.sampler.score(sequence) for sequence in token_ids.tolist()))

        return np.array(self._loop.run(score()), np.float32)


class InProcessSamplers(RankSamplers):
    """The samplers of a rank in a run that samples in the trainer's process.

    Args:
        samplers: the sampler on rank 0; empty on other ranks.
        dtype: dtype in which the sampler receives weights.
        can_sleep: whether the sampler shares the actor's device.
    """

    samplers: Sequence[InProcessSampler]

    def __init__(self, samplers: Sequence[InProcessSampler], dtype: torch.dtype, *, can_sleep: bool) -> None:
        self.samplers = samplers
        self._dtype, self.can_sleep = dtype, can_sleep

    def states(self, weight_version: int) -> SamplerStates:
        """Return which of this rank's samplers have the weights of this version, and how many there are."""
        versions = [one.weight_version for one in self.samplers]
        serving = [number for number, version in enumerate(versions) if version == weight_version]
        return SamplerStates(len(serving) < len(versions), serving, len(versions), len(versions))

    def sleep_before_sync(self) -> None:
        """Free a sampler's memory before a sync (:meth:`RankSamplers.sleep_before_sync`)."""
        for one in self.samplers:
            one.sampler.sleep()

    def update_weights(
        self,
        source: WeightSource,
        weight_version: int,
        on_loaded: Callable[[], None],
        *,
        among: Sequence[VerifiedSampler],
    ) -> Sequence[InProcessSampler]:
        """Send the actor's weights to the sampler (:meth:`RankSamplers.update_weights`)."""
        for one in self.samplers:
            one.sampler.wake()
            one.sampler.update_weights(source, weight_version)
        if not self.samplers:
            send_shards(source, self._dtype)
        on_loaded()
        for one in self.samplers:
            one.weight_version = weight_version
        return self.samplers


@torch.no_grad()
def send_shards(source: WeightSource, dtype: torch.dtype) -> None:
    """Take part in rank 0's :meth:`Sampler.update_weights` on a rank without a sampler: send this rank's shards."""
    weights = [tensor for _, tensor in source.named_weights()]
    nothing = [torch.empty(0, dtype=dtype, device="meta") for _ in weights]
    gather_into(nothing, weights, destination=COLLECTOR_RANK)
