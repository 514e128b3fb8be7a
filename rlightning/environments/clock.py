"""The time of a trajectory: its deadlines, and how long it waits for the engine and for its environment.

All of it is paused while the trajectory waits for a resource, such as a free worker.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from time import monotonic

from rlightning.types.trajectory import Outcome


class Clock:
    """Time limits within one trajectory, and the seconds for which it and its requests have run; pauses do not count.

    ``before`` are the timings of the trajectory before a resume. Methods belong to one event loop.
    """

    def __init__(self, before: Mapping[str, float] | None = None) -> None:
        before = before or {}
        self._deadlines: set[asyncio.Timeout] = set()
        self._stopped_seconds = 0.0
        self._seconds, self._engine_seconds = before.get("trajectory"), before.get("engine", 0.0)
        self._began_at: float | None = None
        self._num_requests, self._requested_at = 0, 0.0

    @asynccontextmanager
    async def limit(self, seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
        """Context manager that raises a TimeoutError after ``seconds``, pauses excluded; None sets no deadline."""
        async with asyncio.timeout(seconds) as deadline:
            self._deadlines.add(deadline)
            try:
                yield deadline
            finally:
                self._deadlines.discard(deadline)

    async def run(self, work: Awaitable[Outcome], seconds: float | None, name: str) -> Outcome:
        """Return the outcome of ``work``; after ``seconds``, cancel it and return an outcome of status "timeout".

        Pauses are not counted. ``name`` is the subject of the outcome's error.
        """
        try:
            async with self.limit(seconds) as deadline:
                return await work
        except TimeoutError:
            if not deadline.expired():
                raise
            return Outcome(status="timeout", error=f"{name} took more than {seconds:g} s.")

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Context manager that pauses all deadlines: the time in it does not count."""
        stopped_at = monotonic()
        held = {one: when for one in self._deadlines if (when := one.when()) is not None and not one.expired()}
        for deadline in held:
            deadline.reschedule(None)
        try:
            yield
        finally:
            seconds = monotonic() - stopped_at
            self._stopped_seconds += seconds
            for deadline in held.keys() & self._deadlines:
                deadline.reschedule(held[deadline] + seconds)

    @property
    def timings(self) -> dict[str, float]:
        """The trajectory's seconds by name: "trajectory" (all), "engine" (while a request runs) and "environment" (the
        rest); empty if it was not timed.
        """
        if self._seconds is None and self._began_at is None:
            return {}
        seconds = self._count_seconds() - self._stopped_seconds
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

    @contextmanager
    def requesting(self) -> Iterator[None]:
        """Context manager that counts its seconds as those of a request; concurrent requests count once."""
        if not self._num_requests:
            self._requested_at = monotonic()
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1
            if not self._num_requests:
                self._engine_seconds += monotonic() - self._requested_at
