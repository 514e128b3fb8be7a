"""Ends what is left of a run's own Ray cluster when its controller or its raylet was killed.

The raylet ends with the controller; its agents stay, and wait for a cluster that is gone. They are killed by
``python -m rlightning.controller.reaper RAYLET AGENT...``, once the raylet or the controller, which holds the
standard input open, has ended. It imports nothing but the standard library.
"""

import os
import select
import subprocess
import sys
from dataclasses import dataclass

from rlightning.processes.process_table import find_children, identify_process, kill_process


@dataclass(frozen=True)
class OwnNode:
    """The node of a Ray cluster that this process has started.

    Attributes:
        raylet: its process id.
        identity: the raylet's, by :func:`~rlightning.processes.process_table.identify_process`.
        reaper: the process whose standard input has to stay open.
    """

    raylet: int
    identity: str
    reaper: "subprocess.Popen[bytes]"

    @property
    def has_ended(self) -> bool:
        """Whether the raylet has."""
        return identify_process(self.raylet) != self.identity


def watch_own_node() -> OwnNode | None:
    """Start a process that kills what the newest raylet of this process leaves; None where none can be found."""
    raylets = [pid for pid, name in find_children(os.getpid()).items() if name == "raylet" and identify_process(pid)]
    if not raylets:
        return None
    raylet = max(raylets, key=lambda pid: int(identify_process(pid).rpartition("/")[2]))
    agents = [identify_process(pid) for pid in find_children(raylet)]
    reaper = subprocess.Popen(
        [sys.executable, "-m", "rlightning.controller.reaper", str(raylet), *agents],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is the controller's
    )
    return OwnNode(raylet, identify_process(raylet), reaper)


def main() -> None:
    """Wait for the end of the raylet or the controller."""
    select.select([sys.stdin, os.pidfd_open(int(sys.argv[1]))], [], [])
    for identity in sys.argv[2:]:
        kill_process(identity)


if __name__ == "__main__":
    main()
