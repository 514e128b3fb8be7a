"""Worker processes for reward functions: one that hangs or dies costs the sample that it was at, and is replaced."""

import math
import multiprocessing
import multiprocessing.connection
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from rlightning import intervals
from rlightning.rewards.calls import Answered, Call, Outcome, Report
from rlightning.rewards.sources import KeptSources
from rlightning.rewards.worker import WorkerFunction
from rlightning.rewards.worker_process import CallThread, WorkerProcess, describe_death, stack_in

MAX_CHUNK = 32
"""Calls sent to a worker at once."""


class Worker(WorkerProcess):
    """One process and the calls that it has not answered, in their order."""

    def __init__(self, functions: Sequence[WorkerFunction | None], sources: KeptSources) -> None:
        super().__init__("rlightning.rewards.worker", functions, sources)
        self.calls: deque[Call] = deque()


class WorkerPool:
    """Runs calls in processes, each with its function's timeout, while the caller does something else.

    Args:
        functions: those that calls name by their index; None where a function does not run here.
        sources: of the functions.
        num_workers: processes at once.
        report: called in a thread with each call as it is done, or once with the error that has ended all of them.
    """

    def __init__(
        self, functions: Sequence[WorkerFunction | None], sources: KeptSources, num_workers: int, report: Report
    ) -> None:
        self.functions = functions
        self.sources = sources
        self.num_workers = num_workers
        self.report = report
        self.workers: list[Worker] = []
        self._thread = CallThread(self._hand_out, self._poll, self._end_workers, report)

    def submit(self, calls: Sequence[Call]) -> None:
        """Let the calls be run; returns at once."""
        self._thread.submit(calls)

    def close(self) -> None:
        """End all processes and drop all calls; what is submitted later starts new ones."""
        self._thread.close()

    def withdraw(self, samples: Collection[int]) -> None:
        """Drop the calls on some samples that have not begun."""
        with self._thread.lock:
            left = [call for call in self._thread.waiting if call.sample not in samples]
            self._thread.waiting = deque(left)

    def _end_workers(self) -> None:
        for worker in list(self.workers):
            self._remove(worker)

    def _hand_out(self, waiting: deque[Call]) -> bool:
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
        return bool(waiting) or any(worker.calls for worker in self.workers)

    def _poll(self) -> None:
        """Wait for the next answers, deaths, deadlines or calls."""
        polled = {worker.connection: worker for worker in self.workers if worker.calls or not worker.is_ready}
        first_deadline = min((worker.deadline for worker in polled.values()), default=math.inf)
        timeout = max(0.0, first_deadline - time.monotonic()) if polled else None
        for connection in multiprocessing.connection.wait([*polled, self._thread.wakeup], timeout):
            if connection is self._thread.wakeup:
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
            raise worker.start_error(exit_code, log)
        if not worker.calls:
            return
        call = worker.calls.popleft()
        self._thread.put_back(worker.calls)
        error = describe_death(exit_code, log)
        if is_overdue or log.startswith("Timeout"):
            timeout = self._timeout(call)
            error = f"{stack_in(log)}TimeoutError: the reward function took more than its timeout={timeout:g} s"
        self.report(Answered(call, Outcome.failed(error)))

    def _remove(self, worker: Worker) -> tuple[int, str]:
        """End a worker; gives its exit code and its log."""
        self.workers.remove(worker)
        return worker.end()

    def _timeout(self, call: Call) -> float:
        function = self.functions[call.function]
        assert function is not None
        return function.timeout

    def _deadline(self, call: Call) -> float:
        return time.monotonic() + self._timeout(call) + intervals.REWARD_KILL_GRACE
