"""Runs reward functions on an event loop: async ones directly, each sync one in a thread.

The loop runs in a worker process (:mod:`~rlightning.rewards.worker`), or, for functions that cannot be pickled, in a
thread of the trainer's process, from the first call until the process ends. There is one loop for all calls because a
client, a lock or a semaphore of a module is bound to the event loop that first used it.
"""

import asyncio
import inspect
import itertools
import os
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from time import monotonic

from rlightning import intervals
from rlightning.callables import is_coroutine_function
from rlightning.rewards.calls import RewardCallable, RewardResult, failure, to_number
from rlightning.rpc.client import LoopThread
from rlightning.rpc.progress import CALL, call_tasks, track_tasks

MAX_CONCURRENT = 64
"""Maximum number of concurrent async calls on an event loop."""


class CallRunner:
    """Runs calls of reward functions on an asyncio event loop, each with its own timeout.

    Args:
        loop: event loop that runs the calls.
        show: called with a call's key and True before a step of one of the call's tasks; with 0 and False after the
            step, and every ``intervals.WORKER_POLL_INTERVAL`` seconds while the loop is free.

    Attributes:
        timeouts: timeout in seconds of each running call, by its key.
        last_beat: time at which the loop was last free, by the loop's clock.
        lost_seconds: total seconds for which the loop was blocked.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, show: Callable[[int, bool], None]) -> None:
        self.timeouts: dict[int, float] = {}
        self.last_beat, self.lost_seconds = loop.time(), 0.0
        self._loop, self._show = loop, show
        track_tasks(loop, show)
        loop.call_soon_threadsafe(self._beat)

    async def run(
        self, key: int, function: RewardCallable, arguments: Mapping[str, object], timeout: float
    ) -> RewardResult:
        """Call a reward function and return its result; at its timeout, cancel it and return a failed result."""
        CALL.set(key)
        self.timeouts[key] = timeout
        # A wrapper of an async def may return its coroutine, or run it on its own loop, which a running loop forbids.
        call = await_result if is_coroutine_function(function) else self._call_in_thread
        task = asyncio.ensure_future(call(partial(function, **arguments)))
        try:
            await self._wait(task, timeout)
        finally:
            is_late = not task.done()
            task.cancel()
            del self.timeouts[key]
        if is_late:
            return RewardResult.failed(f"TimeoutError: the reward function took more than its timeout={timeout:g} s")
        if task.cancelled():
            return RewardResult.failed("CancelledError: the reward function was cancelled by what it called")
        return task.result()

    async def finish(self) -> None:
        """Cancel the tasks that calls left running, and wait until they and async generators have cleaned up."""
        for task in call_tasks(self._loop):
            if not task.cancelling():  # a second cancellation would interrupt its clean-up
                task.cancel()
        await self.wait_cancelled()
        await self._loop.shutdown_asyncgens()

    async def wait_cancelled(self) -> None:
        """Wait until the calls' cancelled tasks have cleaned up, at most ``intervals.CANCEL_GRACE`` seconds."""
        tasks = [task for task in call_tasks(self._loop) if task.cancelling()]
        if tasks:
            await asyncio.wait(tasks, timeout=intervals.CANCEL_GRACE)

    def _beat(self) -> None:
        now = self._loop.time()
        self.lost_seconds += max(now - self.last_beat - intervals.WORKER_POLL_INTERVAL, 0.0)
        self.last_beat = now
        self._show(0, False)
        self._loop.call_later(intervals.WORKER_POLL_INTERVAL, self._beat)

    async def _wait(self, task: "asyncio.Task[RewardResult]", timeout: float) -> None:
        """Wait for a call up to its timeout; seconds in which another call blocked the loop do not count."""
        start, lost = self._loop.time(), self.lost_seconds
        while not task.done():
            left = start + timeout + self.lost_seconds - lost - self._loop.time()
            if left <= 0:
                return
            # Not wait_for, which continues to wait for a function that ignores its cancellation.
            await asyncio.wait({task}, timeout=left)

    async def _call_in_thread(self, call: Callable[[], object]) -> RewardResult:
        returned: asyncio.Future[RewardResult | Awaitable[object]] = self._loop.create_future()

        def run() -> None:
            try:
                value = call()
                result = value if inspect.isawaitable(value) else RewardResult(to_number(value))
            except BaseException as error:
                result = failure(error)
            with suppress(RuntimeError):  # the loop has ended with the process
                self._loop.call_soon_threadsafe(_settle, returned, result)

        threading.Thread(target=run, name="reward", daemon=True).start()
        result = await returned
        return result if isinstance(result, RewardResult) else await await_result(lambda: result)


async def await_result(call: Callable[[], object]) -> RewardResult:
    """Await the result of a call; an exception, including SystemExit, becomes a failed result."""
    try:
        result = call()
        return RewardResult(to_number(await result if inspect.isawaitable(result) else result))
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # SystemExit too, which would end the loop
        return failure(error)


def _settle(
    future: "asyncio.Future[RewardResult | Awaitable[object]]", result: RewardResult | Awaitable[object]
) -> None:
    if not future.done():
        future.set_result(result)
    elif inspect.iscoroutine(result):  # the call was cancelled as too late
        result.close()


class RewardThread(LoopThread):
    """An event loop for reward calls, in a thread of this process.

    Attributes:
        runner: runs the calls.
        current: key of the call whose task is running now, or 0.
        is_blocked: whether the loop counts as blocked and gets no further calls; reset when the loop is free again.
    """

    _keys = itertools.count(1)

    def __init__(self) -> None:
        super().__init__("rewards")
        self.current, self.is_blocked = 0, False
        self.runner = CallRunner(self.loop, self._show)

    def _show(self, call: int, is_executing: bool) -> None:
        self.current = call
        self.is_blocked = False

    @property
    def blocked_seconds(self) -> float:
        """Seconds for which the loop has been blocked, with those in which this process was suspended."""
        return self.loop.time() - self.runner.last_beat

    async def execute(
        self, function: RewardCallable, arguments: Mapping[str, object], timeout: float
    ) -> RewardResult | None:
        """Run a call on this loop for a caller on another loop; it fails if it blocks this loop beyond its timeout.

        Other calls wait for the blocked loop for up to the same time again. If a callback, not a task, blocks the loop,
        all running calls count as the cause. Time in which the caller's loop did not run either, since the process was
        suspended or got no CPU, does not count.

        Returns:
            The result; None if another call still blocks the loop, so that this call has to run on another loop.
        """
        key = next(self._keys)
        beat, polled, suspended = self.runner.last_beat, monotonic(), 0.0
        call = self.submit(self.runner.run(key, function, arguments, timeout))
        outcome = asyncio.wrap_future(call)
        try:
            while True:
                await asyncio.wait({outcome}, timeout=intervals.WORKER_POLL_INTERVAL)
                if outcome.done():
                    return outcome.result()
                if self.runner.last_beat != beat:
                    beat, suspended = self.runner.last_beat, 0.0
                now = monotonic()
                suspended += max(now - polled - 2 * intervals.WORKER_POLL_INTERVAL, 0.0)
                since_beat = self.blocked_seconds
                suspended = min(suspended, since_beat)  # not the part before the beat
                polled, blocked = now, since_beat - suspended
                current, timeouts = self.current, dict(self.runner.timeouts)
                allowed = timeouts.get(current) or max(timeouts.values(), default=timeout)
                if key in timeouts and current in (0, key) and blocked > allowed + intervals.REWARD_BLOCKED_GRACE:
                    return self._describe_block(allowed)
                if blocked > 2 * allowed + intervals.REWARD_BLOCKED_GRACE:
                    self.is_blocked = True
                    return None
        finally:
            call.cancel()

    def _describe_block(self, timeout: float) -> RewardResult:
        frame = sys._current_frames().get(self.ident)
        stack = "".join(traceback.format_stack(frame)[-3:]) if frame is not None else ""
        rule = f"TimeoutError: the async reward function blocked its event loop for more than its timeout={timeout:g} s"
        return RewardResult.failed(f"{stack}{rule}")

    def close(self) -> None:
        """Stop the loop and end its thread; a blocked loop cannot be closed."""
        if self.blocked_seconds < intervals.CANCEL_GRACE:
            super().close()


_threads: list[RewardThread] = []
"""The thread of the process's event loop, and the threads that replaced it while it was blocked."""
os.register_at_fork(after_in_child=_threads.clear)


def free_thread() -> RewardThread:
    """Return the process's thread for reward calls; while its loop is blocked, a new one."""
    for thread in _threads:
        if not thread.is_blocked:
            return thread
    _threads.append(RewardThread())
    return _threads[-1]


async def wait_cancelled() -> None:
    """Wait for the cancelled calls of this process to clean up, except on a blocked loop."""
    free = [thread for thread in _threads if not thread.is_blocked]
    ending = [asyncio.wrap_future(thread.submit(thread.runner.wait_cancelled())) for thread in free]
    if ending:
        await asyncio.wait(ending, timeout=intervals.CANCEL_GRACE + intervals.REWARD_BLOCKED_GRACE)
