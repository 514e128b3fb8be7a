"""A child process that is started, watched, and ended together with its own child processes."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlightning import intervals
from rlightning.foreign_text import cut
from rlightning.processes.process_group import end_group

STANDARD_ERROR = 2
LOG_LINES = 25
"""Number of a log's last lines that an error quotes."""
LOG_BYTES = 1 << 16
"""Bytes at the end of the log from which lines are read."""
BOOTSTRAP = Path(__file__).parent / "bootstrap.py"


class ManagedProcess:
    """A child process in its own session and process group, so that Ctrl-C in the terminal does not reach it.

    Two file descriptors are appended to the command's arguments: one end of a socket pair for calls
    (:func:`~rlightning.rpc.server.serve_parent`), and the lifeline, a pipe that closes when this process ends in any
    way (:func:`~rlightning.processes.process_group.end_with_parent`).

    Args:
        command: program and arguments, as from :func:`python_command`.
        name: name in errors, such as "reward worker".
        log_file: file to which the process's output is appended; None for this process's standard error.
        output: file descriptor for the output, in place of ``log_file``.
        environment: all environment variables of the process; None for those of this process.
        pass_fds: additional file descriptors that the process inherits.

    Attributes:
        connection: this process's end of the socket pair, for :meth:`~rlightning.rpc.peer.Peer.open`.
        pid: id of the process and of its group.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        log_file: Path | None = None,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        output: int | None = None,
    ) -> None:
        self.name, self.log_file = name, log_file
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as opened:
            self.connection, theirs = socket.socketpair()
            ours.callback(self.connection.close)
            opened.callback(theirs.close)
            lifeline, self._lifeline = os.pipe()
            ours.callback(os.close, self._lifeline)
            opened.callback(os.close, lifeline)
            output = STANDARD_ERROR if output is None else output
            if log_file is not None:
                output = os.open(log_file, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o666)
                opened.callback(os.close, output)
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(lifeline)],
                pass_fds=[theirs.fileno(), lifeline, *pass_fds],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=environment,
            )
            ours.pop_all()
        self.pid = self._process.pid
        self._close_lifeline = weakref.finalize(self, os.close, self._lifeline)

    @property
    def exit_code(self) -> int | None:
        """The process's exit code, or minus the number of the signal that ended it; None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """Wait up to ``seconds`` for the process to end; return its exit code, or None if it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def terminate(self, grace: float = 0.0) -> int | None:
        """End the process and all other processes of its group; return its exit code.

        Args:
            grace: seconds between SIGTERM and SIGKILL; with 0 no SIGTERM is sent.
        """
        if grace > 0 and self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGTERM)
            self.wait(grace)
        code = self.exit_code  # read before the group is killed
        end_group(self.pid)
        # To leave no zombie: a killed process cannot be reaped before its last thread has ended.
        killed = self.wait(intervals.ENGINE_EXIT_GRACE)
        self._close_lifeline()
        return killed if code is None else code

    def describe_end(self) -> str:
        """Return how the process ended, such as "exit code 3" or "SIGKILL"; "" while it runs."""
        code = self.exit_code
        if code is None:
            return ""
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def log_lines(self) -> list[str]:
        """Return the last lines of the process's log file; none without a log file."""
        if self.log_file is None or not self.log_file.exists():
            return []
        with self.log_file.open("rb") as file:
            file.seek(max(self.log_file.stat().st_size - LOG_BYTES, 0))
            return file.read().decode(errors="replace").splitlines()

    def log_tail(self) -> str:
        """Return the end of the process's log file, cut to the length for an error message."""
        return cut("\n".join(self.log_lines()[-LOG_LINES:]))


def python_command(module: str, *arguments: str, interpreter: str | None = None) -> list[str]:
    """Return the command that runs a module's ``main()`` in a Python interpreter, perhaps of another environment.

    The command loads this copy of rlightning, without other packages in the same folder. It needs Python 3.10 and
    msgpack.

    Args:
        interpreter: path of the interpreter; None for this process's.
    """
    return [interpreter or sys.executable, str(BOOTSTRAP), module, *arguments]
