"""Runs reward functions on an event loop: async ones directly, each of the others in a thread.

It is the loop of a process for them alone (:mod:`~rlightning.rewards.worker`), or one in a thread of the trainer's
process for functions that cannot be sent to another: one from the first call until the process ends. A client, a lock
or a semaphore that a module keeps is bound to the event loop that first used it, and fails on any other.
"""

import asyncio
import inspect
import itertools
import os
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from rlightning import intervals
from rlightning.rewards.calls import Function, Outcome, failure, to_number
from rlightning.rewards.lookup import unwrap
from rlightning.rpc.client import LoopThread, background_loop
from rlightning.rpc.progress import CALL, call_tasks, track_tasks

MAX_CONCURRENT = 64
"""Async calls of one pool that run at once."""


class CallRunner:
    """Runs calls on an event loop, each with the timeout of its function.

    Args:
        loop: which does not run yet, or runs in this thread.
        show: called with a call's key and True where a task of it goes on; with 0 and False where it stops, and every
            ``intervals.WORKER_POLL_INTERVAL`` that the loop is free.

    Attributes:
        last_beat: when the loop was last free, by its own time.
        lost_seconds: for which the loop was not, in all.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, show: Callable[[int, bool], None]) -> None:
        self.last_beat, self.lost_seconds = loop.time(), 0.0
        self._loop, self._show = loop, show
        track_tasks(loop, show)
        loop.call_soon(self._beat)

    async def run(self, key: int, function: Function, arguments: dict[str, Any]) -> Outcome:
        """Run a call and return its outcome; a call that exceeds its timeout is cancelled."""
        if isinstance(function.function, Outcome):
            return function.function
        CALL.set(key)
        future = self._begin(function.function, arguments)
        try:
            await self._wait(future, function.timeout)
        finally:
            is_late = not future.done()
            future.cancel()
        if is_late:
            return Outcome.failed(
                f"TimeoutError: the reward function took more than its timeout={function.timeout:g} s"
            )
        if future.cancelled():
            return Outcome.failed("CancelledError: the reward function was cancelled by what it called")
        return future.result()

    async def finish(self) -> None:
        """Cancel the tasks that calls left running, and wait for them and for async generators to clean up."""
        tasks = call_tasks(self._loop)
        for task in tasks:
            if not task.cancelling():  # a second time would end its cleaning up
                task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=intervals.CANCEL_GRACE)
        await self._loop.shutdown_asyncgens()

    def _beat(self) -> None:
        now = self._loop.time()
        self.lost_seconds += max(now - self.last_beat - intervals.WORKER_POLL_INTERVAL, 0.0)
        self.last_beat = now
        self._show(0, False)
        self._loop.call_later(intervals.WORKER_POLL_INTERVAL, self._beat)

    def _begin(self, function: Callable[..., Any], arguments: dict[str, Any]) -> "asyncio.Future[Outcome]":
        if _is_coroutine_function(function):
            return asyncio.ensure_future(await_result(partial(function, **arguments)))
        # A wrapper of an async def may return its coroutine, or run it: on a loop of its own, which another forbids.
        return asyncio.ensure_future(self._call_in_thread(function, arguments))

    async def _wait(self, future: "asyncio.Future[Outcome]", timeout: float) -> None:
        """Wait for a call up to its timeout; seconds in which another call blocked the loop do not count."""
        start, lost = self._loop.time(), self.lost_seconds
        while not future.done():
            left = start + timeout + self.lost_seconds - lost - self._loop.time()
            if left <= 0:
                return
            # Not wait_for: that waits on for a function which ignores its cancellation.
            await asyncio.wait({future}, timeout=left)

    async def _call_in_thread(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Outcome:
        future: asyncio.Future[Outcome | Awaitable[Any]] = self._loop.create_future()

        def run() -> None:
            try:
                result = function(**arguments)
                if not inspect.isawaitable(result):
                    result = Outcome(to_number(result))
            except BaseException as error:
                result = failure(error)
            with suppress(RuntimeError):  # the loop has ended with the process
                self._loop.call_soon_threadsafe(_settle, future, result)

        threading.Thread(target=run, name="reward", daemon=True).start()
        result = await future
        return result if isinstance(result, Outcome) else await await_result(lambda: result)


async def await_result(call: Callable[[], Any]) -> Outcome:
    """Await the result of a call; any exception, SystemExit included, becomes a failed outcome."""
    try:
        return Outcome(to_number(await call()))
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # SystemExit too, which would end the loop
        return failure(error)


def _is_coroutine_function(function: object) -> bool:
    """Return whether calling the function creates a coroutine without running anything."""
    inner = unwrap(function)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def _settle(future: "asyncio.Future[Any]", result: Outcome | Awaitable[Any]) -> None:
    if not future.done():
        future.set_result(result)
    elif inspect.iscoroutine(result):  # the call was cancelled as too late
        result.close()


class RewardThread(LoopThread):
    """An event loop for reward calls, in a thread of this process.

    Attributes:
        runner: of its calls.
        current: the key of the call that the task which runs at the moment belongs to, or 0.
        is_blocked: set for a loop that calls are no longer given to; the loop resets it when it is free again.
    """

    def __init__(self) -> None:
        super().__init__("rewards")
        self.current, self.is_blocked = 0, False
        self.runner = self.run(self._make_runner())

    async def _make_runner(self) -> CallRunner:
        return CallRunner(self.loop, self._show)

    def _show(self, call: int, is_executing: bool) -> None:
        self.current = call
        self.is_blocked = False

    @property
    def blocked_seconds(self) -> float:
        """Seconds for which the loop has been blocked."""
        return self.loop.time() - self.runner.last_beat

    def close(self) -> None:
        """See :class:`LoopThread`; a blocked loop cannot be closed."""
        if self.blocked_seconds < intervals.CANCEL_GRACE:
            super().close()


_threads: list[RewardThread] = []
"""The process's loop, and those that took its place while it was blocked."""
os.register_at_fork(after_in_child=_threads.clear)


def free_thread() -> RewardThread:
    """Return the process's thread for rewards, or a new one while the loop of that is blocked."""
    for thread in _threads:
        if not thread.is_blocked:
            return thread
    _threads.append(RewardThread())
    return _threads[-1]


class _LocalCall(NamedTuple):
    """A call in this process: its function and arguments, its thread, and the future of its outcome."""

    function: Function
    arguments: dict[str, Any]
    thread: RewardThread
    outcome: "Future[Outcome]"


class LocalPool:
    """Runs calls in this process: async functions on the loop of a thread, sync ones each in a daemon thread.

    If an async function blocks the loop for longer than its timeout, it has failed. The other calls wait for the loop
    for as long again; then they start anew on another, until this one runs again.

    Args:
        num_threads: sync calls at once.
    """

    _keys = itertools.count(1)

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._calls: dict[int, _LocalCall] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._slots: dict[RewardThread, dict[bool, asyncio.Semaphore]] = {}
        self._watch_lock, self._is_watched = threading.Lock(), False

    def submit(self, function: Function, arguments: dict[str, Any]) -> "Future[Outcome]":
        """Start a call and return at once. Cancelling the future cancels the call."""
        outcome: Future[Outcome] = Future()
        self._start(_LocalCall(function, arguments, free_thread(), outcome))
        with self._watch_lock:
            is_watched, self._is_watched = self._is_watched, True
        if not is_watched:
            background_loop().submit(self._watch_loops())
        return outcome

    def close(self) -> None:
        """Cancel all calls, and wait for them to clean up, except on a blocked loop."""
        threads = set(self._slots)
        for call in list(self._calls.values()):
            call.outcome.cancel()
        for thread in threads:
            if not thread.is_blocked:
                with suppress(TimeoutError):
                    thread.run(self._end_calls(thread), intervals.CANCEL_GRACE + intervals.REWARD_BLOCKED_GRACE)

    def _start(self, call: _LocalCall) -> None:
        key = next(self._keys)
        self._calls[key] = call
        slots = self._slots.setdefault(
            call.thread, {True: asyncio.Semaphore(MAX_CONCURRENT), False: asyncio.Semaphore(self.num_threads)}
        )
        call.outcome.add_done_callback(lambda _: self._forget(key, call))
        call.thread.loop.call_soon_threadsafe(self._make_task, key, call, slots[call.function.is_async])

    def _make_task(self, key: int, call: _LocalCall, slots: asyncio.Semaphore) -> None:
        if key in self._calls:  # else it has been cancelled
            self._tasks[key] = task = call.thread.loop.create_task(self._run(key, call, slots))
            task.add_done_callback(lambda _: self._tasks.pop(key, None))

    async def _run(self, key: int, call: _LocalCall, slots: asyncio.Semaphore) -> None:
        async with slots:
            outcome = await call.thread.runner.run(key, call.function, call.arguments)
        if self._calls.pop(key, None) is not None and call.outcome.set_running_or_notify_cancel():
            call.outcome.set_result(outcome)

    def _forget(self, key: int, call: _LocalCall) -> None:
        """Cancel a call whose future was cancelled."""
        if self._calls.pop(key, None) is not None:
            self._cancel(key, call.thread)

    def _cancel(self, key: int, thread: RewardThread) -> None:
        def cancel() -> None:
            if key in self._tasks:
                self._tasks[key].cancel()

        thread.loop.call_soon_threadsafe(cancel)

    async def _end_calls(self, thread: RewardThread) -> None:
        """Return when all calls of this pool on the thread's loop have ended and cleaned up."""
        await asyncio.sleep(0)  # cancellations that were asked for
        tasks: list[asyncio.Task[object]] = list(self._tasks.values())
        ending = [task for task in tasks if task.get_loop() is thread.loop]
        ending += [task for task in call_tasks(thread.loop) if task.cancelling()]
        if ending:
            await asyncio.wait(ending, timeout=intervals.CANCEL_GRACE)

    async def _watch_loops(self) -> None:
        """Poll the loops while there are calls; fail calls that block a loop, and move the others elsewhere."""
        while True:
            await asyncio.sleep(intervals.WORKER_POLL_INTERVAL)
            with self._watch_lock:
                self._is_watched = bool(self._calls)
                if not self._is_watched:
                    return
            for thread in {call.thread for call in list(self._calls.values())}:
                calls = {key: call for key, call in list(self._calls.items()) if call.thread is thread}
                if thread.blocked_seconds > intervals.REWARD_BLOCKED_GRACE:
                    self._check_block(thread, calls)

    def _check_block(self, thread: RewardThread, calls: dict[int, _LocalCall]) -> None:
        """Fail the call that blocks a loop for longer than its timeout; after twice that, move the others elsewhere.

        Where no task does, as in a callback, all that are running count as its causes; where another pool's does, none.
        """
        blocked, current = thread.blocked_seconds, thread.current
        causes = [key for key in calls if key == current or (not current and key in self._tasks)]
        timeout = max(calls[key].function.timeout for key in causes or calls)
        if blocked < timeout + intervals.REWARD_BLOCKED_GRACE:
            return
        frame = sys._current_frames().get(thread.ident)
        stack = "".join(traceback.format_stack(frame)[-3:]) if frame is not None else ""
        rule = f"TimeoutError: the async reward function blocked its event loop for more than its timeout={timeout:g} s"
        for key in causes:
            if self._calls.pop(key, None) is not None and calls[key].outcome.set_running_or_notify_cancel():
                calls[key].outcome.set_result(Outcome.failed(f"{stack}{rule}"))
        if blocked > 2 * timeout + intervals.REWARD_BLOCKED_GRACE:
            thread.is_blocked = True
            for key in calls:
                call = self._calls.pop(key, None)
                if call is not None:
                    self._cancel(key, thread)
                    self._start(call._replace(thread=free_thread()))
