"""The deadlines of a trajectory, which do not run while it waits for what is no part of it, such as a worker."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


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
