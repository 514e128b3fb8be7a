"""Ends what is left of a run's own Ray cluster when its controller was killed.

All that the controller has started ends with it, the raylet too; the raylet's agents then wait for a cluster that is
gone. ``python -m rlightning.distributed.ray_reaper PROCESS...`` kills them: it reads standard input, which the
controller holds open, to its end. It imports nothing but the standard library.
"""

import os
import subprocess
import sys

from rlightning.distributed.process_identity import find_children, identify_process, kill_process


def start_reaper() -> "subprocess.Popen[bytes]":
    """Start a process that kills the agents of this process's raylets once this process has ended, however it did.

    Returns:
        The process, whose standard input has to stay open.
    """
    raylets = [pid for pid, name in find_children(os.getpid()).items() if name == "raylet"]
    agents = [identify_process(pid) for raylet in raylets for pid in find_children(raylet)]
    return subprocess.Popen(
        [sys.executable, "-m", "rlightning.distributed.ray_reaper", *agents],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is the controller's
    )


def main() -> None:
    """Wait for the controller's end."""
    sys.stdin.buffer.read()
    for identity in sys.argv[1:]:
        kill_process(identity)


if __name__ == "__main__":
    main()
