"""A reward that tells when it was called. Its processes import nothing else."""

import time
from pathlib import Path


def seconds_since(completion: str, *, start: float, note: str) -> float:
    """On the clock that all processes of a machine share; leaves the file ``note``."""
    Path(note).touch()
    return time.monotonic() - start
