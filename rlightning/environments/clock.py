"""The deadlines of a trajectory, which do not run while it waits for what is no part of it, such as a worker."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager

from rlightning.types.trajectory import Outcome


class Clock:
    """Deadlines that stop together. Methods belong to one event loop."""

    def __init__(self) -> None:
        self._deadlines: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def limit(self, seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
        """Raise a TimeoutError after so many seconds, as ``asyncio.timeout``; None: after none."""
        async with asyncio.timeout(seconds) as deadline:
            self._deadlines.add(deadline)
            try:
                yield deadline
            finally:
                self._deadlines.discard(deadline)

    async def run(self, work: Awaitable[Outcome], seconds: float | None, name: str) -> Outcome:
        """Return what ``work`` makes, or that it, by that name, took more than so many seconds."""
        try:
            async with self.limit(seconds) as deadline:
                return await work
        except TimeoutError:
            if not deadline.expired():
                raise
            return Outcome(status="timeout", error=f"{name} took more than {seconds:g} s.")

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Within, no time counts."""
        loop = asyncio.get_running_loop()
        stopped_at = loop.time()
        held = {one: when for one in self._deadlines if (when := one.when()) is not None and not one.expired()}
        for deadline in held:
            deadline.reschedule(None)
        try:
            yield
        finally:
            for deadline in held.keys() & self._deadlines:
                deadline.reschedule(held[deadline] + loop.time() - stopped_at)
