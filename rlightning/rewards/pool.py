"""Worker processes for reward functions: one that hangs or dies costs the sample that it was at, and is replaced.

Plain child processes rather than ``multiprocessing``: nothing forks a threaded torch process, and nothing imports the
user's ``__main__`` again.
"""

import contextlib
import logging
import math
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from rlightning import intervals
from rlightning.errors import RewardError
from rlightning.foreign_text import cut, hidden
from rlightning.rewards.calls import Answered, Call, Outcome, Report
from rlightning.rewards.sources import KeptSources
from rlightning.rewards.worker import WorkerFunction

logger = logging.getLogger(__name__)

START_TIMEOUT = 300.0
"""Seconds in which a worker must have imported the functions' modules."""
MAX_CHUNK = 32
"""Calls sent to a worker at once."""
MAX_LOG_BYTES = 1 << 20
"""Read of what faulthandler has written about a worker."""


class Worker:
    """One process and the calls that it has not answered."""

    def __init__(self, functions: Sequence[WorkerFunction], sources: KeptSources) -> None:
        self.calls: deque[Call] = deque()
        self.is_ready = False
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (the pool closes it)
        self.connection, theirs = multiprocessing.Pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from rlightning.rewards.worker import serve; serve({theirs.fileno()}, {self.log.fileno()})"
        )
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), self.log.fileno()),
                start_new_session=True,  # a group of its own: Ctrl-C passes it by, and its children are killed with it
            )
        self.deadline = time.monotonic() + START_TIMEOUT
        with contextlib.suppress(OSError):  # if it has died already, reading from it fails
            self.connection.send((list(functions), sources.modules, hidden()))

    def kill(self) -> int:
        """End the process and what its functions started; gives its exit code."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.connection.close()
        return self.process.wait()


class WorkerPool:
    """Runs calls in processes, each with its function's timeout, while the caller does something else.

    A thread gives the processes their calls and watches over them. It is there as long as there are calls.

    Args:
        functions: those that calls name by their index; None where a function does not run here.
        sources: of the functions.
        num_workers: processes at once.
        report: called in the thread, with each call as it is done, or once with the error that has ended all of them.
    """

    def __init__(
        self, functions: Sequence[WorkerFunction | None], sources: KeptSources, num_workers: int, report: Report
    ) -> None:
        self.functions = [function or WorkerFunction(b"", 0.0) for function in functions]
        self.sources = sources
        self.num_workers = num_workers
        self.report = report
        self.workers: list[Worker] = []
        self._waiting: deque[Call] = deque()
        self._lock = threading.Lock()  # around what waits, and around the thread's coming and going
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._wakeup_reader, self._wakeup_writer = multiprocessing.Pipe(duplex=False)  # of the thread

    def submit(self, calls: Sequence[Call]) -> None:
        """Let the calls be run; returns at once."""
        if not calls:
            return
        with self._lock:
            self._waiting.extend(calls)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="reward workers", daemon=True)
                self._thread.start()
            else:
                self._wakeup_writer.send_bytes(b"!")

    def withdraw(self, samples: Collection[int]) -> None:
        """Drop the calls on some samples that have not begun."""
        with self._lock:
            self._waiting = deque(call for call in self._waiting if call.sample not in samples)

    def close(self) -> None:
        """End all processes and drop all calls; what is submitted later starts new ones."""
        with self._lock:
            self._waiting.clear()
            self._is_closing = True
            thread = self._thread
            if thread is not None:
                self._wakeup_writer.send_bytes(b"!")
        if thread is not None:
            thread.join()
        with self._lock:
            self._end_workers()
            self._is_closing = False

    def _work(self) -> None:
        try:
            while self._has_work():
                self._poll()
        except BaseException as error:  # raised again where the outcomes are waited for
            with self._lock:
                self._waiting.clear()
                self._end_workers()
                self.report(error)
                self._thread = None

    def _has_work(self) -> bool:
        """Hand out what waits. Without any work left the thread ends; the next call starts another."""
        with self._lock:
            is_idle = not self._waiting and not any(worker.calls for worker in self.workers)
            if self._is_closing or is_idle:
                self._thread = None
                return False
            while self._wakeup_reader.poll():
                self._wakeup_reader.recv_bytes()
            self._hand_out(self._waiting)
            return True

    def _end_workers(self) -> None:
        for worker in list(self.workers):
            self._remove(worker)

    def _hand_out(self, waiting: deque[Call]) -> None:
        """Give idle workers something to do, and start workers for what is left."""
        for worker in list(self.workers):
            if worker.is_ready and not worker.calls and waiting:
                size = max(1, min(MAX_CHUNK, len(waiting) // (2 * self.num_workers)))
                chunk = [waiting.popleft() for _ in range(size)]
                try:
                    worker.connection.send(chunk)
                except OSError:  # it died while idle: no call is the cause
                    waiting.extendleft(reversed(chunk))
                    self._remove(worker)
                    continue
                worker.calls.extend(chunk)
                worker.deadline = self._deadline(chunk[0])
        num_starting = sum(not worker.is_ready for worker in self.workers)
        while len(self.workers) < self.num_workers and num_starting < len(waiting):
            self.workers.append(Worker(self.functions, self.sources))
            num_starting += 1

    def _poll(self) -> None:
        """Wait for the next answers, deaths, deadlines or calls."""
        polled = {worker.connection: worker for worker in self.workers if worker.calls or not worker.is_ready}
        first_deadline = min((worker.deadline for worker in polled.values()), default=math.inf)
        timeout = max(0.0, first_deadline - time.monotonic()) if polled else None
        for connection in multiprocessing.connection.wait([*polled, self._wakeup_reader], timeout):
            if connection is self._wakeup_reader:
                continue
            worker = polled.pop(connection)  # type: ignore[call-overload]
            try:
                message = worker.connection.recv()
            except (EOFError, OSError):
                self._remove_failed(worker)
            else:
                self._answer(worker, message)
        for worker in polled.values():
            # Poll once more: it may be this process that was not scheduled, and the answer has arrived meanwhile.
            if time.monotonic() > worker.deadline and not worker.connection.poll():
                self._remove_failed(worker)

    def _answer(self, worker: Worker, message: Any) -> None:
        if not worker.is_ready:
            worker.is_ready = True
            return
        call = worker.calls.popleft()
        if worker.calls:
            worker.deadline = self._deadline(worker.calls[0])
        self.report(Answered(call, message))

    def _remove_failed(self, worker: Worker) -> None:
        """Report the call that a hung or dead worker was at as failed, and put its others back."""
        is_overdue = time.monotonic() > worker.deadline
        exit_code, log = self._remove(worker)
        if not worker.is_ready:
            state = f"was not ready after {START_TIMEOUT:g} s" if is_overdue else f"died with exit code {exit_code}"
            raise RewardError(f"A reward worker {state} while it imported the reward functions. {cut(log)}".rstrip())
        if not worker.calls:
            return
        call = worker.calls.popleft()
        with self._lock:
            self._waiting.extendleft(reversed(worker.calls))
        timeout = self.functions[call.function].timeout
        if is_overdue or log.startswith("Timeout"):
            error = f"{_stack(log)}TimeoutError: the reward function took more than its timeout={timeout:g} s"
        else:
            cause = signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
            error = f"{_stack(log)}ProcessDied: the reward function ended its process ({cause})"
        self.report(Answered(call, Outcome.failed(error)))

    def _remove(self, worker: Worker) -> tuple[int, str]:
        """End a worker; gives its exit code and its log."""
        self.workers.remove(worker)
        exit_code = worker.kill()
        with worker.log as log:
            log.seek(0)
            return exit_code, log.read(MAX_LOG_BYTES).decode(errors="replace")

    def _deadline(self, call: Call) -> float:
        return time.monotonic() + self.functions[call.function].timeout + intervals.REWARD_KILL_GRACE


def _stack(log: str) -> str:
    """The function's frames, innermost first, from what faulthandler wrote about all threads."""
    for section in re.split(r"\n(?=Current thread|Thread )", log):
        frames = [line for line in section.splitlines() if line.startswith("  File ")]
        ours = next((i for i, line in enumerate(frames) if line.endswith(" in run_call")), None)
        if ours:
            return "Stack (most recent call first):\n" + "\n".join(frames[:ours]) + "\n"
    return ""
