"""What reaches the user's terminal."""

import logging
import sys
from importlib.util import find_spec
from typing import TextIO

from lightning.fabric.utilities.rank_zero import rank_zero_only
from rich import get_console

from rlightning.plain_text import visible


def is_live_terminal() -> bool:
    """Whether standard output can redraw a line: a terminal that is not a dumb one, or a notebook with ipywidgets."""
    console = get_console()
    if console.is_jupyter:
        return find_spec("ipywidgets") is not None  # without it rich draws nothing in a notebook that changes
    return sys.stdout.isatty() and not console.is_dumb_terminal


class _VisibleFormatter(logging.Formatter):
    """Shows control characters, which a message may have from a model or a file, in place of sending them."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of ``record``."""
        return visible(super().format(record))


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to whatever ``sys.stderr`` is at that moment: lines appear above a live progress bar, not in it.

    Of several ranks the first speaks for all; the others are heard when they warn.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(_VisibleFormatter("%(message)s"))
        self.addFilter(lambda record: record.levelno > logging.INFO or getattr(rank_zero_only, "rank", 0) == 0)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def show_log_lines() -> None:
    """Send the package's log lines from INFO on to standard error, as bare messages.

    Does nothing to a program that has configured logging itself, except that INFO counts as wanted if no level was set.
    """
    logger = logging.getLogger("rlightning")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(_StandardError())
