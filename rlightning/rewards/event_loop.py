"""Reward functions on this process's event loop: async ones on it, the others each in a thread.

It is that of a process for them alone (:mod:`~rlightning.rewards.loop_worker`), or the trainer's, for functions that
cannot be sent to another.
"""

import asyncio
import inspect
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from rlightning import intervals
from rlightning.rewards.calls import Answered, Call, Outcome, Report, failure, to_number
from rlightning.rewards.lookup import unwrap
from rlightning.rewards.loop_thread import OWNER, LoopThread, free_loop

MAX_CONCURRENT = 64
"""Async calls of one pool that run at once."""


class LoopFunction(NamedTuple):
    """A reward function of this process.

    Attributes:
        function: if it is no ``async def`` itself it is called in a thread, and what it returns awaited on the loop.
        is_async: whether it mostly waits, so that many calls may run at once.
        timeout: seconds.
    """

    function: Callable[..., Any]
    is_async: bool
    timeout: float


class EventLoopPool:
    """Runs calls concurrently on the process's event loop: async functions on it, sync ones each in a daemon thread.

    The loop outlives the pool, so that what a function keeps between its calls, such as an HTTP client, stays usable
    for all of them (:mod:`~rlightning.rewards.loop_thread`).

    A call that does not end in time is cancelled and counted as failed. If an async function blocks the loop for longer
    than its timeout, it has failed too. The other calls wait for the loop for as long again; then they start anew on
    another, until this one runs again.

    Args:
        functions: those that calls name by their index; None where a function does not run here.
        num_threads: sync calls at once.
        report: called in the loop's thread with each call as it is done; of a call that has been restarted maybe twice.
    """

    def __init__(self, functions: Sequence[LoopFunction | None], num_threads: int, report: Report) -> None:
        self.functions = functions
        self.num_threads = num_threads
        self.report = report
        self._calls: dict[LoopThread, _LoopCalls] = {}

    def submit(self, calls: Sequence[Call]) -> None:
        """Start calls and return at once."""
        if not calls:
            return
        thread = free_loop()
        if thread not in self._calls:
            self._calls[thread] = _LoopCalls(thread, self.functions, self.num_threads, self.report)
        self._calls[thread].add(calls)

    def withdraw(self, samples: Collection[int]) -> None:
        """Cancel the calls on some samples; their outcomes are not reported."""
        for calls in self._calls.values():
            calls.cancel([index for index, call in list(calls.pending.items()) if call.sample in samples])

    def close(self) -> None:
        """Cancel all calls, and let them clean up."""
        for calls in self._calls.values():
            calls.close()
        self._calls.clear()

    def replace_if_blocked(self) -> None:
        """Fail a call that blocks its loop; start the others elsewhere if it goes on for as long again.

        To be called every :data:`~rlightning.rewards.loop_thread.BEAT` by what waits for answers.
        """
        for calls in list(self._calls.values()):
            block = calls.find_block()
            if block is None:
                continue
            for index in block.causes:
                call = calls.pending.pop(index, None)
                if call is not None:  # else it has failed already, or has just ended after all
                    self.report(Answered(call, block.outcome))
            if block.is_lasting:
                calls.thread.is_blocked = True
                rest = list(calls.pending.values())
                calls.cancel(list(calls.pending))
                self.submit(rest)


class _Block(NamedTuple):
    """A loop that does not run, because of a call that is not a coroutine's.

    Attributes:
        causes: the calls that block it, by their numbers.
        outcome: theirs.
        is_lasting: whether the others should not wait any longer.
    """

    causes: list[int]
    outcome: Outcome
    is_lasting: bool


class Owner(NamedTuple):
    """A call, as the owner of the tasks that it creates."""

    calls: "_LoopCalls"
    number: int

    @property
    def call(self) -> Call | None:
        """The call, unless it has ended."""
        return self.calls.pending.get(self.number)


class _LoopCalls:
    """A pool's calls on one event loop."""

    def __init__(
        self, thread: LoopThread, functions: Sequence[LoopFunction | None], num_threads: int, report: Report
    ) -> None:
        self.thread = thread
        self.functions = functions
        self.report = report
        self.pending: dict[int, Call] = {}
        self._num_added = 0
        self._slots = {True: asyncio.Semaphore(MAX_CONCURRENT), False: asyncio.Semaphore(num_threads)}
        """Of async calls, and of threads."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._running: dict[int, asyncio.Future[Outcome]] = {}

    def add(self, calls: Sequence[Call]) -> None:
        """Start the calls as soon as the loop is free."""
        added = dict(enumerate(calls, start=self._num_added))
        self._num_added += len(added)
        self.pending |= added
        self.thread.loop.call_soon_threadsafe(self._start, added)

    def cancel(self, indices: Sequence[int]) -> None:
        """Cancel some calls."""
        for index in indices:
            self.pending.pop(index, None)
        if indices:
            self.thread.loop.call_soon_threadsafe(self._cancel_tasks, indices)

    def close(self) -> None:
        """Cancel all calls and wait until they have ended, unless the loop is blocked."""
        self.pending.clear()
        if not self.thread.is_blocked:
            self.thread.run(self._cancel_all(), intervals.CANCEL_GRACE)

    def find_block(self) -> _Block | None:
        """The block of the loop, if it is longer than the timeout of the call that causes it.

        Where no task does, as in a callback, all that are running count as its causes; where another pool's does, none.
        """
        blocked_seconds = time.monotonic() - self.thread.last_beat
        if blocked_seconds < intervals.REWARD_BLOCKED_GRACE or not self.pending:
            return None
        owner = self.thread.current
        if owner is None:
            causes = [index for index in list(self._running) if index in self.pending]
        else:
            causes = [owner.number] if isinstance(owner, Owner) and owner.calls is self else []
        pending = self.pending.copy()  # the loop may be free again at any moment
        timed = [pending[index] for index in causes if index in pending] or pending.values()
        timeout = max((self._function(call).timeout for call in timed), default=blocked_seconds)
        if blocked_seconds < timeout + intervals.REWARD_BLOCKED_GRACE:
            return None
        frame = sys._current_frames().get(self.thread.ident)
        stack = "".join(traceback.format_stack(frame)[-3:]) if frame is not None else ""
        rule = f"TimeoutError: the async reward function blocked its event loop for more than its timeout={timeout:g} s"
        return _Block(
            causes, Outcome.failed(f"{stack}{rule}"), blocked_seconds > 2 * timeout + intervals.REWARD_BLOCKED_GRACE
        )

    def _start(self, calls: dict[int, Call]) -> None:
        for index, call in calls.items():
            if index in self.pending:  # else it has been cancelled or restarted elsewhere
                task = self.thread.loop.create_task(self._run_call(index, call))
                self._tasks[index] = task
                task.add_done_callback(partial(self._remove_task, index))

    def _remove_task(self, index: int, task: "asyncio.Task[None]") -> None:
        self._tasks.pop(index, None)

    def _cancel_tasks(self, indices: Sequence[int]) -> None:
        for index in indices:
            if index in self._tasks:
                self._tasks[index].cancel()

    async def _cancel_all(self) -> None:
        ending: list[asyncio.Future[Any]] = [*self._tasks.values(), *self._running.values()]
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending, timeout=intervals.CANCEL_GRACE)

    async def _run_call(self, index: int, call: Call) -> None:
        function = self._function(call)
        async with self._slots[function.is_async]:
            OWNER.set(Owner(self, index))
            self._running[index] = future = self._begin(function, call.arguments)
            try:
                await self._wait(future, function.timeout)
            finally:
                del self._running[index]
                is_late = not future.done()
                future.cancel()
        if is_late:
            error = f"TimeoutError: the reward function took more than its timeout={function.timeout:g} s"
            outcome = Outcome.failed(error)
        elif future.cancelled():
            outcome = Outcome.failed("CancelledError: the reward function was cancelled by what it called")
        else:
            outcome = future.result()
        if self.pending.pop(index, None) is not None:
            self.report(Answered(call, outcome))

    async def _wait(self, future: "asyncio.Future[Outcome]", timeout: float) -> None:
        """Wait for a call for the seconds of its timeout, those not counted in which another blocked the loop."""
        start, lost = time.monotonic(), self.thread.lost_seconds
        while not future.done():
            left = start + timeout + self.thread.lost_seconds - lost - time.monotonic()
            if left <= 0:
                return
            # Not wait_for: that waits on for a function which ignores its cancellation.
            await asyncio.wait({future}, timeout=left)

    def _begin(self, function: LoopFunction, arguments: dict[str, Any]) -> "asyncio.Future[Outcome]":
        if _is_coroutine_function(function.function):
            return asyncio.ensure_future(await_result(partial(function.function, **arguments)))
        # A wrapper of an async def may return its coroutine, or run it: on a loop of its own, which another forbids.
        return asyncio.ensure_future(self._call_in_thread(function.function, arguments))

    async def _call_in_thread(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Outcome:
        loop = self.thread.loop
        future: asyncio.Future[Outcome | Awaitable[Any]] = loop.create_future()

        def run() -> None:
            try:
                result = function(**arguments)
                if not inspect.isawaitable(result):
                    result = Outcome(to_number(result))
            except BaseException as error:
                result = failure(error)
            with suppress(RuntimeError):  # the loop has ended with the process
                loop.call_soon_threadsafe(_settle, future, result)

        threading.Thread(target=run, name="reward", daemon=True).start()
        result = await future
        return result if isinstance(result, Outcome) else await await_result(lambda: result)

    def _function(self, call: Call) -> LoopFunction:
        function = self.functions[call.function]
        assert function is not None
        return function


def _is_coroutine_function(function: Any) -> bool:
    """Whether a call only makes a coroutine."""
    inner = unwrap(function)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def _settle(future: "asyncio.Future[Any]", result: Outcome | Awaitable[Any]) -> None:
    if not future.done():
        future.set_result(result)
    elif inspect.iscoroutine(result):  # the call was cancelled as too late
        result.close()


async def await_result(call: Callable[[], Any]) -> Outcome:
    """Await what a call returns; whatever that raises, SystemExit included, becomes an outcome."""
    try:
        result = await call()
        return result if isinstance(result, Outcome) else Outcome(to_number(result))
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # SystemExit too, which would end the loop
        return failure(error)
