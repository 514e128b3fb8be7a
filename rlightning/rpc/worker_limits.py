"""What a worker process may take of memory, and write: above that its pool ends it."""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rlightning.processes.managed_process import STANDARD_ERROR

OUTPUT_SECONDS = 60.0
"""In which a worker may write ``max_output_mb``."""
CHUNK_BYTES = 1 << 16
MB = 1_000_000


class WorkerLimits(NamedTuple):
    """Limits of a worker; None is no limit.

    Attributes:
        max_memory_mb: that the process has in memory.
        max_output_mb: that it writes to its output, with what it has started, in ``OUTPUT_SECONDS``.
    """

    max_memory_mb: float | None = None
    max_output_mb: float | None = None


UNLIMITED = WorkerLimits()


class WorkerOutput:
    """Passes on to this process's standard error what a worker writes, up to a limit; the rest is read and dropped.

    Attributes:
        fd: that the worker writes to; close it by :meth:`close_fd` once the worker has it.
        is_flooded: whether the worker has written more.
    """

    def __init__(self, max_bytes: float) -> None:
        self.max_bytes, self.is_flooded = max_bytes, False
        self._read_fd, self.fd = os.pipe()
        threading.Thread(target=self._pass_on, name="worker output", daemon=True).start()

    def close_fd(self) -> None:
        """Leave the pipe to the worker: when that ends, so does the thread that reads it."""
        os.close(self.fd)

    def _pass_on(self) -> None:
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
    """Return which limit a worker is above, as a sentence's end; None if it is within all."""
    if limits.max_memory_mb is not None:
        memory_mb = resident_bytes(pid) / MB
        if memory_mb > limits.max_memory_mb:
            return f"it had {memory_mb:,.0f} MB in memory, and max_memory_mb={limits.max_memory_mb:g}"
    if output is not None and output.is_flooded:
        return f"it wrote more than max_output_mb={limits.max_output_mb:g} to its output in {OUTPUT_SECONDS:g} s"
    return None


def resident_bytes(pid: int) -> int:
    """Return what a process has in memory; 0 of one that is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
