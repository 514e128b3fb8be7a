"""Cleans up a run's own Ray cluster after its controller or raylet was killed, and reports a killed raylet.

The raylet ends with the controller, but its agents keep running. They are killed by ``python -m
rlightning.controller.reaper LOGS CONTROLLER RAYLET AGENT...`` when the raylet has ended, or the controller, which holds
the standard input open.

Without its raylet a controller raises an error, or Ray's own threads end it by ``_exit``, without any Python code. A
controller that ends in any other way first sends a byte; without the byte, the reaper prints the error message. This
module imports only the standard library.
"""

import atexit
import contextlib
import os
import re
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rlightning.processes.process_table import find_children, identify_process, kill_process, list_processes

ENDED_BY_RAY = re.compile(r"Terminate the process|Raylet IPC connection failed|local [Rr]aylet|Check failed")
"""Messages in the log of a driver that Ray ended because it lost the raylet."""


@dataclass(frozen=True)
class OwnNode:
    """The Ray node that this process has started.

    Attributes:
        identity: the raylet's, from :func:`~rlightning.processes.process_table.identify_process`.
        reaper: its process, whose standard input has to stay open.
    """

    raylet: int
    identity: str
    reaper: "subprocess.Popen[bytes]"

    @property
    def has_ended(self) -> bool:
        """Whether the node's raylet has ended."""
        return identify_process(self.raylet) != self.identity


def watch_own_node(session: str) -> OwnNode | None:
    """Start the process that cleans up after this process's newest raylet, and return both; None if there is no raylet.

    ``session`` is Ray's session folder.
    """
    own = [process for process in list_processes() if process.parent == os.getpid()]
    raylets = [process for process in own if process.name == "raylet" and process.is_alive]
    if not raylets:
        return None
    raylet = max(raylets, key=lambda process: process.start).pid
    agents = [identify_process(pid) for pid in find_children(raylet)]
    reaper = subprocess.Popen(
        [
            *(sys.executable, "-m", "rlightning.controller.reaper", f"{session}/logs"),
            *(str(os.getpid()), str(raylet), *agents),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # the controller handles Ctrl-C
    )
    atexit.register(_announce_exit, reaper)
    return OwnNode(raylet, identify_process(raylet), reaper)


def describe_loss(raylet: int) -> str:
    """Return the error message of a run whose raylet has been killed."""
    return (
        f"The run's Ray cluster has ended: its raylet (process {raylet} on this machine) was killed, or ran out of "
        "memory. The workers have ended with it; go on from the last checkpoint by --ckpt_path last."
    )


def _announce_exit(reaper: "subprocess.Popen[bytes]") -> None:
    """Tell the reaper that this process exits on its own and has logged the reason."""
    assert reaper.stdin is not None
    with contextlib.suppress(OSError):  # the reaper was killed
        reaper.stdin.write(b".")
        reaper.stdin.flush()


def main() -> None:
    """Wait for the end of raylet or controller, kill Ray's agents, and print an error if the raylet was lost."""
    logs, controller, raylet, *agents = sys.argv[1:]
    has_announced_exit, end = False, -1
    with contextlib.suppress(ProcessLookupError):
        end = os.pidfd_open(int(raylet))
    awaited = [0] if end < 0 else [0, end]
    poll = select.poll()  # select() takes no descriptor from 1,024 on
    for fd in awaited:
        poll.register(fd, select.POLLIN)
    while 0 in awaited:
        ready = [fd for fd, _ in poll.poll()]
        if 0 not in ready:  # only the raylet has ended
            awaited.remove(end)
            poll.unregister(end)
        elif os.read(0, 1):
            has_announced_exit = True
        else:
            awaited.remove(0)
        if len(awaited) < 2:
            for identity in agents:
                kill_process(identity)
    if not has_announced_exit and (end not in awaited or _was_ended_by_ray(Path(logs), controller)):
        sys.stderr.write(f"error: {describe_loss(int(raylet))}\n")


def _was_ended_by_ray(logs: Path, controller: str) -> bool:
    """Return whether Ray ended the controller because its raylet was lost; otherwise the controller ended first."""
    paths = logs.glob(f"python-core-driver-*_{controller}.log")
    return any(ENDED_BY_RAY.search(path.read_text(errors="replace")) for path in paths)


if __name__ == "__main__":
    main()
