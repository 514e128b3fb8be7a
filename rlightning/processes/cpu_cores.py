"""Counts the CPU cores among which processes and threads are divided."""

import os


def num_cores() -> int:
    """Return the number of CPU cores that this process may use, at least 1."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
