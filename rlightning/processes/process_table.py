"""The processes of this host, and names for them by which one that is to be killed cannot be mistaken for another."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process as the system lists it; ``start`` is in clock ticks since the host's boot."""

    pid: int
    name: str
    state: str
    parent: int
    group: int
    start: int

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended; a parent that has not waited for it keeps its entry."""
        return self.state not in "ZX"


def find_process(pid: int) -> Process | None:
    """Return a process of this host; None if there is none of this number, or the system does not list any."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")  # a name may hold anything
    state, parent, group, *others = rest.split()
    return Process(pid, name, state, int(parent), int(group), int(others[16]))


def list_processes() -> Iterator[Process]:
    """Yield the processes of this host."""
    for folder in Path("/proc").glob("[0-9]*"):
        process = find_process(int(folder.name))
        if process is not None:
            yield process


def find_children(parent: int) -> dict[int, str]:
    """Return a process's children by number, with the name of each program."""
    return {process.pid: process.name for process in list_processes() if process.parent == parent}


def identify_process(pid: int) -> str:
    """Return what names a process on whatever host: its boot, its namespace, its number, its start.

    It is empty where the system does not tell, or the process has ended.
    """
    process = find_process(pid)
    if process is None or not process.is_alive:
        return ""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), os.stat("/proc/self/ns/pid")
    return f"{boot.read_text().strip()}/{namespace.st_ino}/{pid}/{process.start}"


def kill_process(identity: str) -> None:
    """Kill the process that :func:`identify_process` has named, if it is on this host and still there."""
    parts = identity.split("/")
    if len(parts) == 4 and identify_process(int(parts[2])) == identity:
        os.kill(int(parts[2]), signal.SIGKILL)
