"""A child process that runs reward functions, and the thread that looks after such processes.

Plain child processes rather than ``multiprocessing``: nothing forks a threaded torch process, and nothing imports the
user's ``__main__`` again.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from rlightning.errors import RewardError
from rlightning.foreign_text import cut, hidden
from rlightning.rewards.calls import Call, Report
from rlightning.rewards.sources import KeptSources
from rlightning.rewards.worker import WorkerFunction

START_TIMEOUT = 300.0
"""Seconds in which a worker must have imported the functions' modules."""
MAX_LOG_BYTES = 1 << 20
"""Read of what faulthandler has written about a worker."""
CALLERS = (" in run_call", " in await_result", " in _run_step")
"""Ends of the lines of a stack at which our own frames begin."""


class WorkerProcess:
    """One process of a group of its own, which is not in the terminal's: Ctrl-C passes it by.

    Args:
        module: whose ``serve`` the process runs, with the file descriptors of its connection, of its log, and ``fds``.
        functions: sent first; None where a function does not run there.
        sources: of the functions.
        fds: further file descriptors that the process gets.

    Attributes:
        connection: to it.
        is_ready: whether it has imported the functions; the pool sets it.
        deadline: when it must have answered, as time.monotonic() counts; until it is ready, of that.
    """

    def __init__(
        self, module: str, functions: Sequence[WorkerFunction | None], sources: KeptSources, *fds: int
    ) -> None:
        self.is_ready = False
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (end() closes it)
        self.connection, theirs = multiprocessing.Pipe()
        with theirs:
            passed = (theirs.fileno(), self.log.fileno(), *fds)
            code = f"import sys; sys.path[:] = {sys.path!r}; from {module} import serve; serve{passed!r}"
            self.process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=passed, start_new_session=True
            )
        self.deadline = time.monotonic() + START_TIMEOUT
        with contextlib.suppress(OSError):  # if it has died already, reading from it fails
            self.connection.send(([f or WorkerFunction(b"", 0.0) for f in functions], sources.modules, hidden()))

    def end(self) -> tuple[int, str]:
        """Kill the process and what its functions started.

        Returns:
            Its exit code and its log.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.connection.close()
        exit_code = self.process.wait()
        with self.log as log:
            log.seek(0)
            return exit_code, log.read(MAX_LOG_BYTES).decode(errors="replace")

    def start_error(self, exit_code: int, log: str) -> RewardError:
        """The error of a process that ended before it was ready."""
        is_late = time.monotonic() > self.deadline
        state = f"was not ready after {START_TIMEOUT:g} s" if is_late else f"died with exit code {exit_code}"
        return RewardError(f"A reward worker {state} while it imported the reward functions. {cut(log)}".rstrip())


class CallThread:
    """Calls that wait for a pool's processes, and the thread that gives them out: it is there as long as there are any.

    Args:
        hand_out: called in the thread with what waits, while the lock is held; returns whether there is work left.
        poll: called after each ``hand_out``: waits for what comes next, also of :attr:`wakeup`.
        end: ends the processes.
        report: called once with the error that has ended the thread.

    Attributes:
        lock: around what waits, and around the thread's coming and going.
        wakeup: readable when the thread has something to do.
    """

    def __init__(
        self,
        hand_out: Callable[[deque[Call]], bool],
        poll: Callable[[], None],
        end: Callable[[], None],
        report: Report,
    ) -> None:
        self.waiting: deque[Call] = deque()
        self.lock = threading.Lock()
        self.wakeup, self._wakeup_writer = multiprocessing.Pipe(duplex=False)
        self._hand_out = hand_out
        self._poll = poll
        self._end = end
        self._report = report
        self._thread: threading.Thread | None = None
        self._is_closing = False

    def submit(self, calls: Sequence[Call]) -> None:
        """Let the calls be run; returns at once."""
        if not calls:
            return
        with self.lock:
            self.waiting.extend(calls)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="reward workers", daemon=True)
                self._thread.start()
            else:
                self._wakeup_writer.send_bytes(b"!")

    def put_back(self, calls: Iterable[Call]) -> None:
        """Let calls be run first, in their order."""
        with self.lock:
            self.waiting.extendleft(reversed(list(calls)))

    def close(self) -> None:
        """End all processes and drop all calls; what is submitted later starts new ones."""
        with self.lock:
            self.waiting.clear()
            self._is_closing = True
            thread = self._thread
            if thread is not None:
                self._wakeup_writer.send_bytes(b"!")
        if thread is not None:
            thread.join()
        with self.lock:
            self._end()
            self._is_closing = False

    def _work(self) -> None:
        try:
            while self._has_work():
                self._poll()
        except BaseException as error:  # raised again where the outcomes are waited for
            with self.lock:
                self.waiting.clear()
                self._end()
                self._report(error)
                self._thread = None

    def _has_work(self) -> bool:
        """Hand out what waits. Without any work left the thread ends; the next call starts another."""
        with self.lock:
            while self.wakeup.poll():
                self.wakeup.recv_bytes()
            if self._is_closing or not self._hand_out(self.waiting):
                self._thread = None
                return False
            return True


def describe_death(exit_code: int, log: str) -> str:
    """The error of a call that ended its process."""
    cause = signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
    return f"{stack_in(log)}ProcessDied: the reward function ended its process ({cause})"


def stack_in(log: str) -> str:
    """The function's frames, innermost first, from what faulthandler wrote about all threads."""
    for section in re.split(r"\n(?=Current thread|Thread )", log):
        frames = [line for line in section.splitlines() if line.startswith("  File ")]
        ours = next((i for i, line in enumerate(frames) if line.endswith(CALLERS)), None)
        if ours:
            return "Stack (most recent call first):\n" + "\n".join(frames[:ours]) + "\n"
    return ""
