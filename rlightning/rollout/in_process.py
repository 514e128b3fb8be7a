"""Weight syncs of a sampler in the trainer's process: rank 0 has the sampler, the other ranks send their shards."""

import asyncio
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlightning.rollout.canary import VerifiedSampler
from rlightning.rollout.placement import COLLECTOR_RANK
from rlightning.rollout.sampler import Sampler
from rlightning.rollout.weight_sync import RankSamplers, SamplerStates
from rlightning.rollout.weights import WeightSource
from rlightning.rollout.weights.driver import WeightSender
from rlightning.rollout.weights.source import plan_source
from rlightning.rpc.client import LoopThread

BUCKET_BYTES = 256 << 20
"""Bytes of the bucket in which rank 0 gathers weights; more if one is larger."""


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
        device: the actor's device.
        dtype: dtype in which the sampler receives weights.
        can_sleep: whether the sampler shares the actor's device.
    """

    samplers: Sequence[InProcessSampler]

    def __init__(
        self, samplers: Sequence[InProcessSampler], device: torch.device, dtype: torch.dtype, *, can_sleep: bool
    ) -> None:
        self.samplers = samplers
        self._device, self._dtype, self.can_sleep = device, dtype, can_sleep
        self._sender: WeightSender | None = None

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
        weights = self._gather(source)
        for one in self.samplers:
            one.sampler.wake()
            one.sampler.update_weights(weights, weight_version)
        for _ in weights:  # on ranks without a sampler all, and what the sampler has not taken
            pass
        on_loaded()
        for one in self.samplers:
            one.weight_version = weight_version
        return self.samplers

    def _gather(self, source: WeightSource) -> Iterator[tuple[str, Tensor]]:
        """Yield names and whole weights on the rank with the sampler, and nothing on others, which send their shards;
        every rank must iterate over all of them.
        """
        if self._sender is None:
            plan = plan_source(source, self._dtype, BUCKET_BYTES)
            bucket = torch.empty(plan.num_bytes, dtype=torch.uint8, device=self._device) if self.samplers else None
            self._sender = WeightSender(plan, bucket, destination=COLLECTOR_RANK)
        for chunk in self._sender.fill(source):
            if self.samplers:
                yield from self._sender.plan.tensors(self._sender.bucket, chunk)
