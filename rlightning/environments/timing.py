"""Measures how long trajectories wait for the engine and for their environment."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from rlightning.environments.clock import Clock
from rlightning.rollout import OnTokens, Sampling, TokenSampler, follows_schemas
from rlightning.types.trajectory import Sample


class TimedSampler(TokenSampler):
    """The sampler of one trajectory, which measures the time during which it has at least one running request.

    ``before`` are the timings of the trajectory before a resume. Time in which the trajectory's ``clock`` is stopped
    does not count.
    """

    def __init__(self, sampler: TokenSampler, before: Mapping[str, float] | None = None) -> None:
        self._sampler, self.clock, before = sampler, Clock(), before or {}
        self._seconds, self._engine_seconds = before.get("trajectory"), before.get("engine", 0.0)
        self._began_at: float | None = None
        self._num_requests, self._requested_at = 0, 0.0

    @property
    def follows_schemas(self) -> bool:
        """Whether the sampler can constrain a turn to a JSON schema
        (:class:`~rlightning.rollout.sampler.StructuredSampler`).
        """
        return follows_schemas(self._sampler)

    @property
    def timings(self) -> dict[str, float]:
        """The trajectory's seconds by name: "trajectory" (all), "engine" (while a request runs) and "environment" (the
        rest); empty if it was not timed.
        """
        if self._seconds is None and self._began_at is None:
            return {}
        seconds = self._count_seconds() - self.clock.stopped_seconds
        engine = min(self._engine_seconds, seconds)
        return {"trajectory": seconds, "engine": engine, "environment": seconds - engine}

    def _count_seconds(self) -> float:
        began_at = self._began_at
        return (self._seconds or 0.0) + (0.0 if began_at is None else monotonic() - began_at)

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Context manager that adds the time spent in it to the trajectory's seconds."""
        self._began_at = monotonic()
        try:
            yield
        finally:
            self._seconds, self._began_at = self._count_seconds(), None

    async def sample(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        num_samples: int = 1,
        session: str | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[Sample]:
        """Sample as :class:`~rlightning.rollout.sampler.TokenSampler` does, and measure the time."""
        streaming = (
            {} if on_tokens is None else {"on_tokens": on_tokens}
        )  # a sampler that never streams need not take it
        with self._requesting():
            return await self._sampler.sample(
                token_ids, sampling, num_samples=num_samples, session=session, **streaming
            )

    @contextmanager
    def _requesting(self) -> Iterator[None]:
        """Context manager that counts its seconds as those of a request."""
        if not self._num_requests:
            self._requested_at = monotonic()
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1
            if not self._num_requests:
                self._engine_seconds += monotonic() - self._requested_at

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the log-probabilities of ``token_ids`` at temperature 1: [P], 0 for the first token."""
        return await self._sampler.score(token_ids)
