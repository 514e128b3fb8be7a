"""A worker process for async reward functions: a call that blocks or ends it costs its sample, and it is replaced."""

import multiprocessing.connection
import os
import queue
import subprocess
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress

from rlightning import intervals
from rlightning.rewards.calls import Answered, Call, Outcome, Report
from rlightning.rewards.event_loop import MAX_CONCURRENT
from rlightning.rewards.loop_thread import BEAT
from rlightning.rewards.loop_worker import STACK_SIGNAL, LoopState
from rlightning.rewards.sources import KeptSources
from rlightning.rewards.worker import WorkerFunction
from rlightning.rewards.worker_process import CallThread, WorkerProcess, describe_death, stack_in

STACK_SECONDS = 1.0
"""In which a blocked process writes its stacks; one that is stopped writes none."""


class LoopProcess(WorkerProcess):
    """A process with an event loop, and the calls that run on it.

    Attributes:
        calls: by their keys.
        is_testing: whether the one call that runs is a suspect, which others must not run beside.
        silent_seconds: for which the loop has not got on, as long as this process could see it.
    """

    def __init__(self, functions: Sequence[WorkerFunction | None], sources: KeptSources) -> None:
        self.state = LoopState.create()
        super().__init__("rlightning.rewards.loop_worker", functions, sources, self.state.fd)
        self.calls: dict[int, Call] = {}
        self.is_testing = False
        self.silent_seconds = 0.0
        self._progress = 0
        self._last_look = time.monotonic()
        # A process that does not read must not block whoever has something to say to it.
        self._messages: queue.SimpleQueue[list[Call] | frozenset[int] | None] = queue.SimpleQueue()
        threading.Thread(target=self._send, name="reward messages", daemon=True).start()

    def begin(self, calls: list[Call], *, is_testing: bool = False) -> None:
        """Start calls on its loop."""
        if not self.calls:
            self.silent_seconds = 0.0
        self.is_testing = is_testing
        self.calls |= {call.key: call for call in calls}
        self._messages.put(calls)

    def cancel(self, samples: Collection[int]) -> None:
        """Cancel the calls on some samples, and forget them."""
        self.calls = {key: call for key, call in self.calls.items() if call.sample not in samples}
        self._messages.put(frozenset(samples))

    def check_progress(self) -> None:
        """Add to :attr:`silent_seconds`; to be called every :data:`BEAT`."""
        now = time.monotonic()
        progress = self.state.progress
        # Where the time was longer it may be the two processes, or the machine, that were stopped.
        self.silent_seconds += min(now - self._last_look, 2 * BEAT)
        if progress != self._progress:
            self.silent_seconds = 0.0
        self._progress, self._last_look = progress, now

    def write_stacks(self) -> None:
        """Have it write the stacks of its threads into its log."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, STACK_SIGNAL)
        end = time.monotonic() + STACK_SECONDS
        while time.monotonic() < end and not os.fstat(self.log.fileno()).st_size:
            time.sleep(intervals.SHORT_POLL_INTERVAL)

    def finish(self) -> None:
        """Let calls, tasks and asynchronous generators clean up; to be called before :meth:`end`."""
        self._messages.put(None)
        if self.is_ready:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(3 * intervals.CANCEL_GRACE)

    def end(self) -> tuple[int, str]:
        """See :class:`WorkerProcess`."""
        self._messages.put(None)
        try:
            return super().end()
        finally:
            self.state.close()

    def _send(self) -> None:
        with suppress(OSError):  # the process has ended
            while (message := self._messages.get()) is not None:
                self.connection.send(message)
            self.connection.send(None)


class AsyncPool:
    """Runs async calls in one process, up to 64 at once, each with its function's timeout.

    What a function's module keeps between calls, such as an HTTP client, serves them all: the process has one event
    loop. A call that takes too long is cancelled there. One that blocks the loop for longer than its timeout, or ends
    the process, has failed; the others that ran start anew in another process. Where it cannot be known which call it
    was, as it was a thread's doing, they run one by one there.

    Args:
        functions: those that calls name by their index; None where a function does not run here.
        sources: of the functions.
        report: called in a thread with each call as it is done, or once with the error that has ended all of them.
    """

    def __init__(self, functions: Sequence[WorkerFunction | None], sources: KeptSources, report: Report) -> None:
        self.functions = functions
        self.sources = sources
        self.report = report
        self._worker: LoopProcess | None = None
        self._suspects: deque[Call] = deque()  # of having ended a process; run one by one
        self._thread = CallThread(self._hand_out, self._poll, self._end_worker, report)

    def submit(self, calls: Sequence[Call]) -> None:
        """Let the calls be run; returns at once."""
        self._thread.submit(calls)

    def withdraw(self, samples: Collection[int]) -> None:
        """Cancel the calls on some samples; their outcomes are not reported."""
        with self._thread.lock:
            self._thread.waiting = deque(call for call in self._thread.waiting if call.sample not in samples)
            self._suspects = deque(call for call in self._suspects if call.sample not in samples)
            if self._worker is not None:
                self._worker.cancel(samples)

    def close(self) -> None:
        """Cancel all calls, let them clean up, and end the process; what is submitted later starts another."""
        self._thread.close()
        self._suspects.clear()

    def _end_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.finish()
            worker.end()

    def _hand_out(self, waiting: deque[Call]) -> bool:
        if not (waiting or self._suspects or (self._worker and self._worker.calls)):
            return False
        if self._worker and not self._worker.calls and self._worker.process.poll() is not None:
            self._end_worker()  # it died while idle: no call is the cause
        worker = self._worker = self._worker or LoopProcess(self.functions, self.sources)
        if not worker.is_ready or (worker.calls and (worker.is_testing or self._suspects)):
            return True
        if self._suspects:
            worker.begin([self._suspects.popleft()], is_testing=True)
        elif num_free := min(len(waiting), MAX_CONCURRENT - len(worker.calls)):
            worker.begin([waiting.popleft() for _ in range(num_free)])
        return True

    def _poll(self) -> None:
        """Wait for the next answer, death, block or call."""
        worker = self._worker
        assert worker is not None  # there is work
        ready = multiprocessing.connection.wait([worker.connection, self._thread.wakeup], BEAT)
        worker.check_progress()
        if worker.connection in ready:
            try:
                message = worker.connection.recv()
            except (EOFError, OSError):
                self._replace(worker, is_blocked=False)
                return
            self._answer(worker, message)
        elif self._is_overdue(worker):
            worker.write_stacks()
            self._replace(worker, is_blocked=True)

    def _answer(self, worker: LoopProcess, message: "str | tuple[int, Outcome]") -> None:
        if isinstance(message, str):
            worker.is_ready = True
            return
        key, outcome = message
        with self._thread.lock:
            call = worker.calls.pop(key, None)
        if call is not None:  # else it was withdrawn
            self.report(Answered(call, outcome))

    def _is_overdue(self, worker: LoopProcess) -> bool:
        if not worker.is_ready:
            return time.monotonic() > worker.deadline
        with self._thread.lock:
            cause = worker.calls.get(worker.state.running)
            timeouts = [self._timeout(call) for call in ([cause] if cause else worker.calls.values())]
        return bool(timeouts) and worker.silent_seconds > max(timeouts) + intervals.REWARD_BLOCKED_GRACE

    def _replace(self, worker: LoopProcess, *, is_blocked: bool) -> None:
        """End a blocked or dead process; report the call that was the cause as failed, and start the others anew."""
        running = worker.state.running
        exit_code, log = worker.end()
        self._worker = None
        if not worker.is_ready:
            raise worker.start_error(exit_code, log)
        with self._thread.lock:
            calls = dict(worker.calls)
            cause = calls.pop(running, None) or (calls.popitem()[1] if len(calls) == 1 else None)
            if cause is None:
                self._suspects.extend(calls.values())
            else:
                self._thread.waiting.extendleft(reversed(calls.values()))
        if cause is not None:
            error = describe_death(exit_code, log)
            if is_blocked:
                rule = f"blocked its event loop for more than its timeout={self._timeout(cause):g} s"
                error = f"{stack_in(log)}TimeoutError: the async reward function {rule}"
            self.report(Answered(cause, Outcome.failed(error)))

    def _timeout(self, call: Call) -> float:
        function = self.functions[call.function]
        assert function is not None
        return function.timeout
