"""A reward that tells when it was called. Its processes import nothing else."""

import time
from pathlib import Path


def seconds_since(completion: str, *, start: float, note: str) -> float:
    """On the clock that all processes of a machine share; then leaves the file ``note``."""
    seconds = time.monotonic() - start
    Path(note).touch()
    return seconds
