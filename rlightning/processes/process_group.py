"""Ends a process with all processes that it has started, and removes their shared memory.

vLLM's processes communicate by named shared memory, which outlives them. Python's resource tracker, a process of the
same group, removes this memory after all users have ended, and is therefore ended last.
"""

import contextlib
import ctypes
import fcntl
import logging
import os
import select
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from rlightning import intervals
from rlightning.processes.liveness import Deadline
from rlightning.processes.process_table import list_processes
from rlightning.processes.scratch import SHARED_MEMORY, remove_scratch

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when the parent thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_parent(lifeline: int) -> None:
    """Have the kernel kill this process and its process group when the parent process ends.

    This works even while a call holds the GIL.

    Args:
        lifeline: the reading end of a pipe whose other end only the parent has open; nothing is ever written to it.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    # AgentCommand sends this function's source to another process: it calls no other function of this module.
    poll = select.poll()  # select() takes no descriptor from 1,024 on, which a process with many connections passes on
    poll.register(lifeline, select.POLLIN)
    if poll.poll(0):  # the parent had ended before
        os.killpg(0, signal.SIGKILL)


def end_group(group: int) -> None:
    """Kill every process of a process group except this one; wait until they have ended, at most two minutes."""
    tracker_grace, end = Deadline(intervals.TRACKER_GRACE), Deadline(2 * intervals.TRACKER_GRACE)
    killed = {group}
    while members := _others(group):
        killed.update(members)
        _send(signal.SIGKILL, (pid for pid in members if tracker_grace.is_over or not _is_tracker(pid)))
        _send(signal.SIGCONT, members)  # a tracker that is suspended with its group would never clean up
        if end.is_over:
            log.warning("Processes %s do not end, although they were killed.", members)
            return
        time.sleep(intervals.SHORT_POLL_INTERVAL)
    _remove_torch_memory(killed)


def end_own_group(scratch: Path) -> None:
    """Remove the folder ``scratch``, then kill this process's group, including this process."""
    deadline, killed = Deadline(intervals.TRACKER_GRACE), {os.getpid()}
    while not deadline.is_over:
        # Trackers stay: they detect the end of this process, and clean up.
        members = [pid for pid in _others(os.getpgid(0)) if not _is_tracker(pid)]
        if not members:
            break
        killed.update(members)
        _send(signal.SIGKILL, members)
        time.sleep(intervals.SHORT_POLL_INTERVAL)
    _remove_torch_memory(killed)
    remove_scratch(scratch)
    os.kill(os.getpid(), signal.SIGKILL)


def _remove_torch_memory(processes: Iterable[int]) -> None:
    """Remove torch's shared memory files of killed processes, which no resource tracker removes."""
    for process in processes:
        for segment in SHARED_MEMORY.glob(f"torch_{process}_*"):
            with contextlib.suppress(OSError):
                segment.unlink()


def _others(group: int) -> list[int]:
    """Return the living processes of a group except this one."""
    members = (process for process in list_processes() if process.group == group and process.is_alive)
    return [process.pid for process in members if process.pid != os.getpid()]


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _send(number: signal.Signals, pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
