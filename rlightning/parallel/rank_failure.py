"""The failure of a rank in the form that is reported to the other ranks."""

from dataclasses import dataclass

import torch.distributed as dist

from rlightning.error_report import exit_code
from rlightning.errors import find_run_error
from rlightning.foreign_text import cut_line

TERMINATED = 143
"""Exit code that a scheduler expects of a process that SIGTERM ended."""
DISCONNECTED = "is gone: it was killed, or ended without a word"


@dataclass(frozen=True)
class Failure:
    """The failure of one rank, which ends the run.

    Attributes:
        rank: the rank that failed.
        text: follows "rank 1 " in messages, such as "failed: ValueError: boom".
        exit_code: the exit code of all ranks.
        is_foreseen: whether the failed rank's error line is sufficient, so that the others log nothing.
    """

    rank: int
    text: str
    exit_code: int = 1
    is_foreseen: bool = False

    @classmethod
    def of(cls, rank: int, error: BaseException) -> "Failure":
        """Return the failure to report for a rank in which ``error`` was raised."""
        return cls(rank, describe(error), exit_code(error), is_foreseen=find_run_error(error) is not None)


def is_failure(error: BaseException) -> bool:
    """Return whether an exception is a failure: any exception except an exit without a code or after SIGTERM."""
    return not isinstance(error, SystemExit) or error.code not in (None, 0, TERMINATED)


def is_of_collective(error: BaseException) -> bool:
    """Return whether an exception comes from a collective or its connections, so that another rank may be the cause."""
    # gloo raises a bare RuntimeError that begins with its source file.
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error))


def describe(error: BaseException) -> str:
    """Return an exception in one line that follows "rank 1 ", such as "failed: ValueError: boom"."""
    if isinstance(error, KeyboardInterrupt):
        return "was interrupted"
    lines = str(error).strip().splitlines() or [""]
    return f"failed: {type(error).__name__}: {cut_line(lines[0])}".removesuffix(": ")
