"""Handling of disk errors: the run ends with a one-line error if it needs the file; other files are skipped."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlightning.errors import SaveError
from rlightning.foreign_text import cut_line

log = logging.getLogger(__name__)

TORCH_FAILURES = ("inline_container", "PytorchStreamWriter", "iostream error", "cannot be opened", "Parent directory")
"""Phrases in the messages of ``torch.save``'s errors if a file cannot be written."""


class BestEffort:
    """Guards the writing of files that a run can do without: disk errors are logged once, and the run continues.

    Args:
        what: the files' name in the plural, at the beginning of a log line.

    Attributes:
        has_failed: whether an attempt has failed since the last :meth:`settle`.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.has_failed = False
        self._is_failing = False

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Context manager that suppresses disk errors, and logs the first of a series; other errors are raised."""
        try:
            yield
        except Exception as error:
            cause = error if isinstance(error, OSError) else error.__cause__  # some loggers wrap OSErrors in their own
            if not isinstance(cause, OSError):
                raise
            self.has_failed = True
            if not self._is_failing:
                self._is_failing = True
                log.warning(
                    "%s cannot be written (%s). The run goes on without, and writes them again as soon as it can.",
                    self.what,
                    describe(cause),
                )

    def settle(self) -> None:
        """End a round of attempts: if all succeeded after failures in earlier rounds, log that writing works again."""
        if self._is_failing and not self.has_failed:
            self._is_failing = False
            log.info("%s are written again.", self.what)
        self.has_failed = False

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Context manager for one round of writing, in which disk errors are logged and suppressed."""
        with self.attempt():
            yield
        self.settle()


@contextmanager
def needed(what: str, path: Path, way_out: str) -> Iterator[None]:
    """Context manager in which a disk error becomes a one-line error that ends the run.

    Args:
        what: name of the file in the error.
        path: path of the file.
        way_out: a sentence about what has been saved, and what to do.

    Raises:
        SaveError: a disk error has occurred; other errors are not changed.
    """
    try:
        yield
    except BaseException as error:  # torch.distributed.checkpoint's error is not an Exception
        reason = find_disk_error(error)
        if reason is None:
            raise
        raise SaveError(f"{what} '{path}' cannot be written: {reason}. {way_out}") from error


def find_disk_error(error: BaseException) -> str | None:
    """Return the disk problem behind an error of Python, torch or safetensors; None for other errors.

    An OSError without an error number has other causes, such as a barrier's timeout.
    """
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
        return describe(error)
    for failure in getattr(error, "failures", {}).values():  # torch.distributed.checkpoint's, by rank
        inner = failure[0] if isinstance(failure, tuple) else failure
        if isinstance(inner, Exception) and (reason := find_disk_error(inner)) is not None:
            return reason
    text = str(error)
    if isinstance(error, RuntimeError) and any(phrase in text for phrase in TORCH_FAILURES):
        context = error.__context__
        return describe(context) if isinstance(context, OSError) else "the disk did not take all of it"
    if type(error).__name__ == "SafetensorError" and "I/O error" in text:
        return cut_line(text)
    return None


def describe(error: OSError) -> str:
    """Return an OSError as a part of a log line."""
    place = f": '{error.filename}'" if error.filename is not None else ""
    return cut_line(f"{error.strerror}{place}" if error.strerror else str(error))
