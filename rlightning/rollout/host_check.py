"""Checks of the host's resources that an engine needs: shared memory, open files, a network interface."""

import contextlib
import os
import resource
import socket
from pathlib import Path

from rlightning import intervals
from rlightning.errors import EngineStartError

SHARED_MEMORY = Path("/dev/shm")
MIN_SHARED_BYTES = 1 << 20
"""Least free bytes in /dev/shm, for semaphores and small segments of Python and OpenMP."""
MIN_SHARED_BYTES_OF_WORKERS = 64 << 20
"""Least free bytes in /dev/shm for an engine of several workers, which exchange results there."""
SCARCE_SHARED_BYTES = 512 << 20
"""Free bytes of /dev/shm below which the error of an engine that ended for no known reason mentions them."""
MIN_OPEN_FILES = 256
"""Least number of files that an engine's process must be allowed to have open at once."""
WANTED_OPEN_FILES = 65536
"""Number of open files that an engine's process raises its limit to, as far as the host allows."""


def check_host(num_workers: int) -> None:
    """Raise an error if this host lacks the shared memory, open files or loopback of an engine of ``num_workers``.

    Raises:
        EngineStartError: names what is missing and the remedy.
    """
    needed = MIN_SHARED_BYTES_OF_WORKERS if num_workers > 1 else MIN_SHARED_BYTES
    for problem in (describe_shared_memory(needed), describe_open_files(), describe_network()):
        if problem is not None:
            raise EngineStartError(f"An engine cannot start on this host: {problem}")


def describe_host() -> str:
    """Return sentences about scarce resources that may have kept an engine from starting; "" if there are none."""
    problems = (describe_shared_memory(SCARCE_SHARED_BYTES), describe_open_files(), describe_network())
    return " ".join(problem for problem in problems if problem is not None)


def describe_shared_memory(needed: int) -> str | None:
    """Return a sentence if /dev/shm has less than ``needed`` bytes free; None if it has enough."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        return f"{SHARED_MEMORY} cannot be used ({error.strerror}). Mount a tmpfs there."
    free, size = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    if free >= needed:
        return None
    return (
        f"{SHARED_MEMORY} has {free / 2**20:.1f} of {size / 2**20:.1f} MiB free, and {needed >> 20} MiB are needed. "
        "Remove what earlier programs have left there, or give it more room: docker run --shm-size=8g, or "
        f"mount -o remount,size=8g {SHARED_MEMORY}."
    )


def describe_open_files() -> str | None:
    """Return a sentence if the limit on open files is too low and cannot be raised; else None."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= MIN_OPEN_FILES:
        return None
    return (
        f"a process may have {hard} files open at once, and {MIN_OPEN_FILES} are needed. Raise the hard limit: "
        f"ulimit -n {WANTED_OPEN_FILES}, or docker run --ulimit nofile={WANTED_OPEN_FILES}."
    )


def describe_network() -> str | None:
    """Return a sentence if the loopback interface, which connects an engine's processes, is missing; else None."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=intervals.CONNECT_TIMEOUT).close()
    except OSError as error:
        return (
            f"it has no network interface that is up, not even the loopback one ({error.strerror or error}). Bring "
            "that up: ip link set lo up."
        )
    return None


def raise_open_files() -> None:
    """Raise this process's limit on open files to ``WANTED_OPEN_FILES``, as far as the host allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_OPEN_FILES if hard == resource.RLIM_INFINITY else min(WANTED_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some systems allow less than they report
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
