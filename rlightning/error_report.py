"""How the command line reports a failed run: one line on standard error, and the traceback in the run's folder."""

import os
import sys
import time
import traceback
from pathlib import Path

from rlightning import intervals
from rlightning.errors import find_run_error
from rlightning.foreign_text import visible, visible_on_one_line, without_secrets

FILE = "error.txt"
"""File in the run's folder for the traceback of the error that ended the run."""
SHOW_TRACE = "RLIGHTNING_TRACEBACK"
"""Environment variable with which the traceback is shown on standard error too, unless it is empty or 0."""
INTERRUPTED = 130
"""Exit code of a process that Ctrl-C ended, by the convention of shells: 128 plus the signal's number."""

_folder: Path | None = None


def set_run_folder(folder: Path | None) -> None:
    """Set the folder for tracebacks; called after this run has locked the folder."""
    global _folder
    _folder = folder


def exit_code(error: BaseException) -> int:
    """Return the exit code of a process that ends with ``error``."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    expected = find_run_error(error)
    return 1 if expected is None else expected.exit_code


def show_error(error: BaseException) -> None:
    """Write the error that ended the run to standard error.

    For a foreseen error write its line; if it is not a ConfigError, first a line that names the file with the
    traceback. For any other error write the traceback.
    """
    expected = find_run_error(error)
    if isinstance(error, KeyboardInterrupt):
        sys.stderr.write("interrupted\n")
    elif expected is None:
        traceback.print_exception(error)
    else:
        trace = visible(without_secrets("".join(traceback.format_exception(error))))
        is_mistake = expected.exit_code == 2
        # A ConfigError's line suffices, and the folder may be another run's. Without a folder, the traceback is shown.
        kept = None if is_mistake else _write(trace)
        if _shows_trace() or (kept is None and not is_mistake):
            sys.stderr.write(trace)
        if kept is not None:
            sys.stderr.write(f"The trace of this error is in {kept}.\n")
        sys.stderr.write(f"error: {visible_on_one_line(without_secrets(expected.line))}\n")


def _shows_trace() -> bool:
    return os.environ.get(SHOW_TRACE, "0") not in ("", "0")


def _write(trace: str) -> Path | None:
    """Write a traceback to the run's folder and return the file; None without a folder or if writing fails."""
    if _folder is None:
        return None
    path = _folder / FILE
    try:
        _folder.mkdir(parents=True, exist_ok=True)
        path.write_text(trace, encoding="utf-8")
    except OSError:
        return None
    return path


def is_other_rank() -> bool:
    """Return whether the launcher's environment variables give this process a rank other than 0."""
    return any(os.environ.get(name, "0") != "0" for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))


def yield_to_rank_0() -> None:
    """On ranks other than 0, sleep for a few seconds: if all ranks have the same error, rank 0 reports it first and
    ends them.
    """
    if is_other_rank():
        time.sleep(intervals.RANK_0_GRACE)
