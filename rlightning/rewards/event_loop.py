"""A thread with an event loop, for reward functions that are async, and for those that cannot go to another process."""

import asyncio
import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rlightning.rewards.calls import Answered, Call, Outcome, Report, failure, to_number

MAX_CONCURRENT = 64
"""Async calls of one loop that run at once."""
BEAT = 0.1
"""Seconds between two signs of life of the loop."""
GRACE = 0.5
"""Seconds over a call's timeout after which a loop without a sign of life counts as blocked by it."""


class LoopFunction(NamedTuple):
    """A reward function of this process, and its timeout in seconds."""

    function: Callable[..., Any]
    is_async: bool
    timeout: float


class EventLoopPool:
    """Runs calls concurrently on one event loop: async functions on it, sync ones each in a daemon thread.

    A call that does not end in time is left alone and counted as failed. An async function that blocks the loop itself
    is found by the loop's missing beat: the loop is left to it, and the other calls start again on a new one.

    Args:
        functions: those that calls name by their index; None where a function does not run here.
        num_threads: sync calls at once.
        report: called in the loop's thread with each call as it is done; of a call that has been restarted maybe twice.
    """

    def __init__(self, functions: Sequence[LoopFunction | None], num_threads: int, report: Report) -> None:
        self.functions = functions
        self.num_threads = num_threads
        self.report = report
        self._loop: _Loop | None = None

    def submit(self, calls: Sequence[Call]) -> None:
        """Let the calls be run; returns at once."""
        if not calls:
            return
        if self._loop is None:
            self._loop = _Loop(self.functions, self.num_threads, self.report)
        self._loop.add(calls)

    def close(self) -> None:
        """Leave what still runs to itself."""
        if self._loop is not None:
            self._loop.stop()
            self._loop = None

    def replace_if_blocked(self) -> None:
        """See whether the loop is; to be called every :data:`BEAT` by whoever waits for answers."""
        blocked = None if self._loop is None else self._loop.find_blocking_call()
        if self._loop is None or blocked is None:
            return
        index, outcome = blocked
        pending = self._loop.pending
        call = pending.pop(index, None)
        if call is None:  # it has just ended after all
            return
        rest = list(pending.values())
        pending.clear()
        self.close()
        self.submit(rest)
        self.report(Answered(call, outcome))


class _Loop:
    """One event loop in a daemon thread, with the calls that it has to run."""

    def __init__(self, functions: Sequence[LoopFunction | None], num_threads: int, report: Report) -> None:
        self.functions = functions
        self.report = report
        self.pending: dict[int, Call] = {}
        self._num_added = 0
        self._slots = {True: asyncio.Semaphore(MAX_CONCURRENT), False: asyncio.Semaphore(num_threads)}
        """Of async calls, and of threads."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: dict[asyncio.Future[Any], int] = {}
        self._last_beat = time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
        self._thread.start()

    def add(self, calls: Sequence[Call]) -> None:
        """Start the calls, as soon as the loop gets to it."""
        added = dict(enumerate(calls, start=self._num_added))
        self._num_added += len(added)
        self.pending |= added
        self._loop.call_soon_threadsafe(self._start, added)

    def stop(self) -> None:
        """Ask the loop to end; it may be blocked, so nobody waits for it."""
        with contextlib.suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._loop.stop)

    def find_blocking_call(self) -> tuple[int, Outcome] | None:
        """The call that holds up the loop, if one does for longer than its timeout, with its outcome."""
        silence = time.monotonic() - self._last_beat
        if silence < GRACE:
            return None
        task = asyncio.current_task(self._loop)
        index = self._running.get(task) if task is not None else None
        if index is None or index not in self.pending:
            return None
        timeout = self._function(self.pending[index]).timeout
        if silence < timeout + GRACE:
            return None
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = "".join(traceback.format_stack(frame)[-3:]) if frame is not None else ""
        rule = f"TimeoutError: the async reward function blocked its event loop for more than its timeout={timeout:g} s"
        return index, Outcome(None, f"{stack}{rule}")

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._beat()
        self._loop.run_forever()
        # Tasks that do not end in time are cancelled and left: waiting for them here could take forever.
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def _beat(self) -> None:
        self._last_beat = time.monotonic()
        self._loop.call_later(BEAT, self._beat)

    def _start(self, calls: dict[int, Call]) -> None:
        for index, call in calls.items():
            task = self._loop.create_task(self._run_call(index, call))
            self._tasks.add(task)  # the loop itself would forget it
            task.add_done_callback(self._tasks.discard)

    async def _run_call(self, index: int, call: Call) -> None:
        function = self._function(call)
        async with self._slots[function.is_async]:
            future: asyncio.Future[Outcome]
            if function.is_async:
                future = asyncio.ensure_future(_await(function.function, call.arguments))
            else:
                future = self._start_thread(function.function, call.arguments)
            self._running[future] = index
            # Not wait_for: that waits on for a function which ignores its cancellation.
            done, _ = await asyncio.wait({future}, timeout=function.timeout)
            del self._running[future]
        if done:
            outcome = future.result()
        else:
            future.cancel()
            error = f"TimeoutError: the reward function took more than its timeout={function.timeout:g} s"
            outcome = Outcome(None, error)
        if self.pending.pop(index, None) is not None:
            self.report(Answered(call, outcome))

    def _start_thread(self, function: Callable[..., Any], arguments: dict[str, Any]) -> "asyncio.Future[Outcome]":
        future: asyncio.Future[Outcome] = self._loop.create_future()

        def run() -> None:
            try:
                outcome = Outcome(to_number(function(**arguments)))
            except BaseException as error:
                outcome = failure(error)
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
                self._loop.call_soon_threadsafe(_settle, future, outcome)

        threading.Thread(target=run, name="reward", daemon=True).start()
        return future

    def _function(self, call: Call) -> LoopFunction:
        function = self.functions[call.function]
        assert function is not None
        return function


def _settle(future: "asyncio.Future[Outcome]", outcome: Outcome) -> None:
    if not future.done():  # given up as too late
        future.set_result(outcome)


async def _await(function: Callable[..., Any], arguments: dict[str, Any]) -> Outcome:
    try:
        return Outcome(to_number(await function(**arguments)))
    except Exception as error:
        return failure(error)
