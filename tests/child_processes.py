"""The children of this process: which of them a test leaves behind."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import fork_server
import pytest
from waiting import is_running, wait_for

from rlightning.processes.process_table import find_children

OF_LIBRARIES = ("resource_tracker", "multiprocessing.forkserver", "compile_worker", "wandb-core", "gpu_stats", "orted")
"""In the commands of helpers that libraries start once, and end with this process."""
LEAVE_SECONDS = 60.0
"""For a child that was killed to be gone."""


def find_own_children() -> set[int]:
    """The ids of this process's children, without those that serve it until its end."""
    found = find_children(os.getpid()).keys() - {fork_server.server_pid()}
    return {pid for pid in found if not any(name in read_command(pid) for name in OF_LIBRARIES)}


def read_command(pid: int) -> str:
    """A process's command line; empty for one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
    except OSError:
        return ""


@contextlib.contextmanager
def none_are_left() -> Iterator[None]:
    """Fail, and end it, if a child that is started within goes on after the end."""
    before = find_own_children()
    yield
    started = find_own_children() - before
    if not started:
        return

    def find_left() -> list[int]:
        # A library's helper that has just been started may have shown another command before its own.
        return [pid for pid in started & find_own_children() if is_running(pid)]

    with contextlib.suppress(AssertionError):
        wait_for(lambda: not find_left(), LEAVE_SECONDS)
    left = find_left()
    commands = [f"{pid}: {read_command(pid)}" for pid in left]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if commands:
        pytest.fail("Child processes are left behind:\n" + "\n".join(commands), pytrace=False)
