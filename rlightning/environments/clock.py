"""Deadlines of a trajectory, which are paused while the trajectory waits for a resource, such as a free worker."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager
from time import monotonic

from rlightning.types.trajectory import Outcome


class Clock:
    """Time limits within one trajectory, which can be paused together, such as while it waits for a worker.

    ``stopped_seconds`` is the total time of the pauses. Methods belong to one event loop.
    """

    def __init__(self) -> None:
        self._deadlines: set[asyncio.Timeout] = set()
        self.stopped_seconds = 0.0

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
            self.stopped_seconds += seconds
            for deadline in held.keys() & self._deadlines:
                deadline.reschedule(held[deadline] + seconds)
