"""Lists this host's processes, and identifies each uniquely, so that no process with a reused id is killed."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process of this host, as ``/proc`` lists it; ``start`` is in clock ticks since the host's boot."""

    pid: int
    name: str
    state: str
    parent: int
    group: int
    start: int

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs; an ended process stays in the table until its parent waits for it."""
        return self.state not in "ZX"


def find_process(pid: int) -> Process | None:
    """Return the process with this id; None if it does not exist, or the system has no ``/proc``."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")  # a name may contain any character
    state, parent, group, *others = rest.split()
    return Process(pid, name, state, int(parent), int(group), int(others[16]))


def list_processes() -> Iterator[Process]:
    """Yield the processes of this host."""
    for folder in Path("/proc").glob("[0-9]*"):
        process = find_process(int(folder.name))
        if process is not None:
            yield process


def find_children(parent: int) -> dict[int, str]:
    """Return the child processes of a process: the name of each one's program by process id."""
    return {process.pid: process.name for process in list_processes() if process.parent == parent}


def identify_process(pid: int) -> str:
    """Return a text that identifies a process uniquely: the host's boot, pid namespace, process id and start time.

    "" if the system does not provide these, or the process has ended.
    """
    process = find_process(pid)
    if process is None or not process.is_alive:
        return ""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), os.stat("/proc/self/ns/pid")
    return f"{boot.read_text().strip()}/{namespace.st_ino}/{pid}/{process.start}"


def kill_process(identity: str) -> None:
    """Kill the process that :func:`identify_process` identified, if it is on this host and still runs."""
    parts = identity.split("/")
    if len(parts) == 4 and identify_process(int(parts[2])) == identity:
        os.kill(int(parts[2]), signal.SIGKILL)
