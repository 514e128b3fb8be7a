"""Limits on a worker process's memory and output; the pool ends a worker that exceeds one."""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rlightning.processes.managed_process import STANDARD_ERROR

OUTPUT_SECONDS = 60.0
"""Period in seconds in which a worker may write at most ``max_output_mb``."""
CHUNK_BYTES = 1 << 16
MB = 1_000_000


class WorkerLimits(NamedTuple):
    """The limits of a worker; None for no limit.

    Attributes:
        max_memory_mb: maximum resident memory of the process.
        max_output_mb: maximum output in ``OUTPUT_SECONDS`` of the process and its child processes.
    """

    max_memory_mb: float | None = None
    max_output_mb: float | None = None


UNLIMITED = WorkerLimits()


class WorkerOutput:
    """Copies a worker's output to this process's standard error up to a limit; the rest is discarded.

    Attributes:
        fd: file descriptor for the worker's output; call :meth:`close_fd` once the worker has inherited it.
        is_flooded: whether the worker has exceeded the limit.
    """

    def __init__(self, max_bytes: float) -> None:
        self.max_bytes, self.is_flooded = max_bytes, False
        self._read_fd, self.fd = os.pipe()
        threading.Thread(target=self._forward, name="worker output", daemon=True).start()

    def close_fd(self) -> None:
        """Close this process's end of the pipe, so that the reading thread ends with the worker."""
        os.close(self.fd)

    def _forward(self) -> None:
        num_bytes, began_at = 0, time.monotonic()
        while data := os.read(self._read_fd, CHUNK_BYTES):
            now = time.monotonic()
            if now - began_at > OUTPUT_SECONDS:
                num_bytes, began_at = 0, now
            num_bytes += len(data)
            if num_bytes > self.max_bytes:
                self.is_flooded = True
            else:
                with suppress(OSError):  # nothing reads this process's output
                    os.write(STANDARD_ERROR, data)
        os.close(self._read_fd)


def find_excess(limits: WorkerLimits, pid: int, output: WorkerOutput | None) -> str | None:
    """Return which limit a worker exceeds, as the end of a sentence; None if it exceeds none."""
    if limits.max_memory_mb is not None:
        memory_mb = resident_bytes(pid) / MB
        if memory_mb > limits.max_memory_mb:
            return f"it had {memory_mb:,.0f} MB in memory, and max_memory_mb={limits.max_memory_mb:g}"
    if output is not None and output.is_flooded:
        return f"it wrote more than max_output_mb={limits.max_output_mb:g} to its output in {OUTPUT_SECONDS:g} s"
    return None


def resident_bytes(pid: int) -> int:
    """Return a process's resident memory in bytes; 0 if the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
