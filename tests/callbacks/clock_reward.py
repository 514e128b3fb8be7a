"""A reward that tells when it was called. Its processes import nothing else."""

import time


def seconds_since(completion: str, *, start: float) -> float:
    """On the clock that all processes of a machine share."""
    return time.monotonic() - start
