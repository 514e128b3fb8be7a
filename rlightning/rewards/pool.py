"""Worker processes for reward functions: one that hangs or dies costs the sample that it was at, and is replaced.

Plain child processes rather than ``multiprocessing``: nothing forks a threaded torch process, and nothing imports the
user's ``__main__`` again.
"""

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from rlightning.errors import RewardError
from rlightning.rewards.calls import Call, Outcome, Report
from rlightning.rewards.worker import WorkerFunction

logger = logging.getLogger(__name__)

START_TIMEOUT = 300.0
"""Seconds in which a worker must have imported the functions' modules."""
GRACE = 2.0
"""Seconds after a call's timeout in which the worker's own watchdog should have ended it."""
MAX_CHUNK = 32
"""Calls sent to a worker at once."""


class Worker:
    """One process and the calls that it has not answered."""

    def __init__(self, functions: Sequence[WorkerFunction]) -> None:
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
        with contextlib.suppress(OSError):  # one that is dead already is met as such when it is listened to
            self.connection.send(list(functions))

    def kill(self) -> int:
        """End the process and what its functions started; gives its exit code."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.connection.close()
        return self.process.wait()


class WorkerPool:
    """Runs calls in processes, each with its function's timeout.

    Args:
        functions: those that calls name by their index; None where a function does not run here.
        num_workers: processes at once.
    """

    def __init__(self, functions: Sequence[WorkerFunction | None], num_workers: int) -> None:
        self.functions = [function or WorkerFunction(b"", 0.0) for function in functions]
        self.num_workers = num_workers
        self.workers: list[Worker] = []

    def run(self, calls: Iterable[Call], report: Report) -> None:
        """Run all calls, and report each as it is done.

        Args:
            calls: in any order.
            report: called in this thread; what it raises ends the run of the rest.
        """
        waiting = deque(calls)
        try:
            while waiting or any(worker.calls for worker in self.workers):
                self._hand_out(waiting)
                self._listen(waiting, report)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all processes; a later run starts new ones."""
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
                except OSError:  # it died while idle: no call is to blame
                    waiting.extendleft(reversed(chunk))
                    self._remove(worker)
                    continue
                worker.calls.extend(chunk)
                worker.deadline = self._deadline(chunk[0])
        num_starting = sum(not worker.is_ready for worker in self.workers)
        while len(self.workers) < self.num_workers and num_starting < len(waiting):
            self.workers.append(Worker(self.functions))
            num_starting += 1

    def _listen(self, waiting: deque[Call], report: Report) -> None:
        """Wait for the next answers, deaths or deadlines."""
        listened = {worker.connection: worker for worker in self.workers if worker.calls or not worker.is_ready}
        first_deadline = min(worker.deadline for worker in listened.values())
        patience = max(0.0, first_deadline - time.monotonic())
        for connection in multiprocessing.connection.wait(list(listened), patience):
            worker = listened.pop(connection)  # type: ignore[call-overload]
            try:
                message = worker.connection.recv()
            except (EOFError, OSError):
                self._bury(worker, waiting, report)
            else:
                self._answer(worker, message, report)
        now = time.monotonic()
        for worker in listened.values():
            if now > worker.deadline:
                self._bury(worker, waiting, report)

    def _answer(self, worker: Worker, message: Any, report: Report) -> None:
        if not worker.is_ready:
            worker.is_ready = True
            return
        call = worker.calls.popleft()
        if worker.calls:
            worker.deadline = self._deadline(worker.calls[0])
        report(call, message)

    def _bury(self, worker: Worker, waiting: deque[Call], report: Report) -> None:
        """Report the call that a hung or dead worker was at as failed, and put its others back."""
        is_overdue = time.monotonic() > worker.deadline
        exit_code, log = self._remove(worker)
        if not worker.is_ready:
            state = f"was not ready after {START_TIMEOUT:g} s" if is_overdue else f"died with exit code {exit_code}"
            raise RewardError(f"A reward worker {state} while it imported the reward functions. {log}".rstrip())
        if not worker.calls:
            return
        call = worker.calls.popleft()
        waiting.extendleft(reversed(worker.calls))
        timeout = self.functions[call.function].timeout
        if is_overdue or log.startswith("Timeout"):
            error = f"{_stack(log)}TimeoutError: the reward function took more than its timeout={timeout:g} s"
        else:
            cause = signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
            error = f"{_stack(log)}ProcessDied: the reward function ended its process ({cause})"
        report(call, Outcome(None, error))

    def _remove(self, worker: Worker) -> tuple[int, str]:
        """End a worker; gives its exit code and its log."""
        self.workers.remove(worker)
        exit_code = worker.kill()
        with worker.log as log:
            log.seek(0)
            return exit_code, log.read().decode(errors="replace")

    def _deadline(self, call: Call) -> float:
        return time.monotonic() + self.functions[call.function].timeout + GRACE


def _stack(log: str) -> str:
    """The function's frames, innermost first, from what faulthandler wrote about all threads."""
    for section in re.split(r"\n(?=Current thread|Thread )", log):
        frames = [line for line in section.splitlines() if line.startswith("  File ")]
        ours = next((i for i, line in enumerate(frames) if line.endswith(" in run_call")), None)
        if ours:
            return "Stack (most recent call first):\n" + "\n".join(frames[:ours]) + "\n"
    return ""
