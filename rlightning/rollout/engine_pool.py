"""All engines of a run as one sampler, on rank 0: each request goes to the least loaded engine.

An engine serves while it has the current weights. Requests of an engine that dies are repeated by other engines, or
wait until an engine serves again. Each rank starts its own engines and sends them weights
(:mod:`~rlightning.rollout.rank_engines`).
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlightning.errors import EngineDiedError, StreamLostError
from rlightning.rollout.engine import EngineSampler
from rlightning.rollout.prefix_cache import PrefixCacheUse
from rlightning.rollout.sampler import OnTokens, Sampling
from rlightning.types import Sample

T = TypeVar("T")

MAX_SESSIONS = 1 << 16
"""Maximum number of sessions whose engine is remembered: the most recently used ones."""


class EngineId(NamedTuple):
    """Identifies an engine: its rank, and its index among the rank's engines."""

    rank: int
    number: int


class PooledEngine:
    """An engine of the pool.

    Attributes:
        load: number of completions that the engine is sampling.
        is_serving: whether the engine receives requests.
        num_starts: how often the engine has begun to serve.
    """

    def __init__(self, engine: EngineSampler) -> None:
        self.engine = engine
        self.load = self.num_starts = 0
        self.is_serving = False
        self._idle_since: float | None = None
        self._idle_seconds = 0.0

    def update_idle_time(self) -> None:
        """Add the time since the last call to the idle time, if the engine was serving and had no requests."""
        now = time.monotonic()
        if self._idle_since is not None:
            self._idle_seconds += now - self._idle_since
        self._idle_since = now if self.is_serving and not self.load else None

    def take_idle_seconds(self) -> float:
        """Return the seconds without a request since the last call, and reset them."""
        self.update_idle_time()
        seconds, self._idle_seconds = self._idle_seconds, 0.0
        return seconds


class EnginePool:
    """Distributes requests over several engines. An engine has to raise an EngineDiedError once it is dead.

    All methods belong to one event loop; :attr:`num_serving` may be read anywhere.

    Args:
        engines: the engines of all ranks.
        on_death: called when a request fails because its engine is dead.
    """

    follows_schemas = EngineSampler.follows_schemas

    def __init__(self, engines: Mapping[EngineId, EngineSampler], on_death: Callable[[], None]) -> None:
        self.members = {engine_id: PooledEngine(engine) for engine_id, engine in engines.items()}
        self._on_death = on_death
        self._engine_by_session: OrderedDict[str, PooledEngine] = OrderedDict()
        self._is_serving = asyncio.Event()

    @property
    def num_serving(self) -> int:
        """Number of engines that receive requests."""
        return sum(member.is_serving for member in self.members.values())

    def set_serving(self, serving: Collection[EngineId]) -> None:
        """Send requests only to these engines from now on; requests that waited for an engine are sent."""
        for engine_id, member in self.members.items():
            member.num_starts += engine_id in serving and not member.is_serving
            member.is_serving = engine_id in serving
            member.update_idle_time()
        if serving:
            self._is_serving.set()
        else:
            self._is_serving.clear()

    def remove(self, engine_ids: Collection[EngineId]) -> None:
        """Send no further requests to these engines."""
        self.set_serving({one for one, member in self.members.items() if member.is_serving} - set(engine_ids))

    def take_idle_seconds(self) -> float:
        """Return the seconds for which serving engines had no request since the last call, averaged over engines."""
        return sum(member.take_idle_seconds() for member in self.members.values()) / len(self.members)

    def take_prefix_cache(self) -> PrefixCacheUse:
        """Return the numbers of prompt tokens, and of cached ones, since the last call."""
        total = PrefixCacheUse()
        for member in self.members.values():
            total.add(member.engine.prefix_cache.take())
        return total

    async def sample(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        num_samples: int = 1,
        session: str | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[Sample]:
        """Sample from an engine (:meth:`TokenSampler.sample`), for a session from the same one as long as it is alive.

        Raises:
            StreamLostError: the engine died after the first tokens; another engine might sample different tokens.
        """
        has_begun = False

        def forward_tokens(number: int, tokens: Sequence[int]) -> None:
            nonlocal has_begun
            assert on_tokens is not None
            has_begun = True
            on_tokens(number, tokens)

        async def request(engine: EngineSampler) -> list[Sample]:
            if has_begun:
                raise StreamLostError("The engine died while its tokens were streamed.")
            forward = None if on_tokens is None else forward_tokens
            return await engine.sample(token_ids, sampling, num_samples=num_samples, session=session, on_tokens=forward)

        return await self._request(request, num_samples, session)

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Return log-probabilities from an engine (:meth:`TokenSampler.score`)."""
        return await self._request(lambda engine: engine.score(token_ids), 1, None)

    async def _request(self, request: Callable[[EngineSampler], Awaitable[T]], load: int, session: str | None) -> T:
        while True:
            while not self._is_serving.is_set():  # after a wait it may have been cleared again
                await self._is_serving.wait()
            member = self._select(session)
            num_starts = member.num_starts
            member.load += load
            member.update_idle_time()
            try:
                return await request(member.engine)
            except EngineDiedError:
                if member.num_starts == num_starts and member.is_serving:
                    self.remove({engine_id for engine_id, one in self.members.items() if one is member})
                    self._on_death()
            finally:
                member.load -= load
                member.update_idle_time()

    def _select(self, session: str | None) -> PooledEngine:
        """Return the engine of a session, or else the least loaded engine."""
        if session is None:
            return self._least_loaded()
        member = self._engine_by_session.pop(session, None)
        if member is None or not member.is_serving:
            member = self._least_loaded()
        self._engine_by_session[session] = member
        if len(self._engine_by_session) > MAX_SESSIONS:
            self._engine_by_session.popitem(last=False)
        return member

    def _least_loaded(self) -> PooledEngine:
        return min((one for one in self.members.values() if one.is_serving), key=lambda member: member.load)
