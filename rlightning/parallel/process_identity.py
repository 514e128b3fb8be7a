"""Names processes for good, so that one that is to be killed cannot be mistaken for another."""

import os
import signal
from pathlib import Path


def identify_process(pid: int) -> str:
    """Return what names a process on whatever host: its boot, its namespace, its number, its start.

    It is empty where the system does not tell, or the process has ended.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else f"{boot}/{namespace}/{pid}/{rest[18]}"


def kill_process(identity: str) -> None:
    """Kill the process that :func:`identify_process` has named, if it is on this host and still there."""
    parts = identity.split("/")
    if len(parts) == 4 and identify_process(int(parts[2])) == identity:
        os.kill(int(parts[2]), signal.SIGKILL)


def find_children(parent: int) -> dict[int, str]:
    """Return a process's children by number, with the name of each program."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue  # it has ended
        if int(rest.split()[1]) == parent:
            found[int(folder.name)] = name
    return found
