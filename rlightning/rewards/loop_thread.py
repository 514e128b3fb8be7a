"""The event loop that async reward functions run on: one in a process, from the first call until the process ends.

A client, a lock or a semaphore that a module keeps is bound to the event loop that first used it, and fails on any
other. So steps, validations and runs of one process share one loop.
"""

import asyncio
import atexit
import os
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

from rlightning import intervals

BEAT = 0.1
"""Seconds between two heartbeats of a loop."""
OWNER: ContextVar[object] = ContextVar("OWNER", default=None)
"""Whose call a task belongs to; tasks that it creates inherit it."""


class LoopThread:
    """An event loop in a daemon thread; it is closed when the process ends.

    Attributes:
        loop: runs in the thread.
        last_beat: when it was last free, as time.monotonic() counts.
        lost_seconds: in which the loop did not run, in all.
        is_blocked: set for a loop that calls are no longer given to; the loop resets it when it is free again.
        current: what :data:`OWNER` was where the task that runs at the moment was created; None between two tasks.
        watch: called in the thread with each beat, and where a task goes on and stops.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_task_factory(self._make_task)
        self.current: object = None
        self.watch: Callable[[LoopThread], None] = _ignore
        self.last_beat = time.monotonic()
        self.lost_seconds = 0.0
        self.is_blocked = False
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def ident(self) -> int:
        """Of the thread."""
        return self._thread.ident or 0

    def run(self, work: Coroutine[Any, Any, None], seconds: float) -> None:
        """Run a coroutine on the loop and wait for it, for a limited time: the loop may be blocked."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        with suppress(TimeoutError):
            future.result(seconds + intervals.REWARD_BLOCKED_GRACE)

    def close(self) -> None:
        """Cancel all tasks, let them and asynchronous generators clean up, and close the loop, unless it is blocked."""
        if self.is_blocked or time.monotonic() - self.last_beat > intervals.CANCEL_GRACE:
            return
        self.run(self._end_tasks(), intervals.CANCEL_GRACE)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(intervals.CANCEL_GRACE)

    async def _end_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=intervals.CANCEL_GRACE)
        await self.loop.shutdown_asyncgens()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self._beat()
        self.loop.run_forever()
        self.loop.close()

    def _make_task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> "asyncio.Task[Any]":
        return asyncio.Task(_Steps(work, self, OWNER.get()), loop=loop, **options)

    def _beat(self) -> None:
        now = time.monotonic()
        self.lost_seconds += max(now - self.last_beat - BEAT, 0.0)
        self.last_beat = now
        self.is_blocked = False
        self.watch(self)
        self.loop.call_later(BEAT, self._beat)


class _Steps(Coroutine[Any, Any, Any]):
    """A task's coroutine, which tells its loop's thread whose it is for as long as each of its steps takes."""

    def __init__(self, work: Coroutine[Any, Any, Any], thread: LoopThread, owner: object) -> None:
        self._work = work
        self._thread = thread
        self._owner = owner

    def send(self, value: Any) -> Any:
        return self._run_step(self._work.send, value)

    def throw(self, *error: Any) -> Any:
        return self._run_step(self._work.throw, *error)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Any:
        return self._work.__await__()

    def __getattr__(self, name: str) -> Any:
        """What libraries ask of a coroutine, such as ``cr_frame``."""
        return getattr(self._work, name)

    def _run_step(self, step: Callable[..., Any], *arguments: Any) -> Any:
        thread = self._thread
        thread.current = self._owner
        thread.watch(thread)
        try:
            return step(*arguments)
        finally:
            thread.current = None
            thread.watch(thread)


def _ignore(thread: LoopThread) -> None:
    """Nobody watches."""


_loops: list[LoopThread] = []
"""The process's loop, and those that took its place while it was blocked."""
os.register_at_fork(after_in_child=_loops.clear)


def free_loop() -> LoopThread:
    """The process's event loop or, while that is blocked, another."""
    for thread in _loops:
        if not thread.is_blocked:
            return thread
    _loops.append(LoopThread())
    return _loops[-1]
