"""The package's output to the user's terminal: log lines and warnings."""

import logging
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from lightning.fabric.utilities.rank_zero import rank_zero_only
from rich import get_console

from rlightning.foreign_text import visible

IGNORED_WARNINGS = (
    ".*does not have many workers.*",
    # The loader of a prompt set that a stage does not use has no batches.
    ".*Total length of `.*` across ranks is zero.*",
    # Evaluation mode is intended: without dropout, actor and engine compute the same.
    ".*module\\(s\\) in eval mode at the start of training.*",
    ".*LeafSpec.*is deprecated.*",
    # Steps are saved whole, after their last optimizer step.
    "(?s).*Using ModelCheckpoint with manual optimization.*",
    # All ranks log the same step.
    ".*It is recommended to use `self.log\\('step', .*, sync_dist=True\\)`.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    "(?s).*JsonargparseDeprecationWarning.*",
    "(?s).*``instantiate_classes`` was deprecated.*",
)
"""Regular expressions of warnings that no user could avoid."""


def is_live_terminal() -> bool:
    """Return whether standard output can redraw a line: a capable terminal, or a notebook with ipywidgets."""
    console = get_console()
    if console.is_jupyter:
        return find_spec("ipywidgets") is not None  # without ipywidgets rich cannot update its output in a notebook
    return sys.stdout.isatty() and not console.is_dumb_terminal


class _VisibleFormatter(logging.Formatter):
    """A log formatter that escapes control characters in texts from a model or a file."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of ``record``, with control characters escaped."""
        return visible(super().format(record))


class _StandardError(logging.StreamHandler[TextIO]):
    """A stream to the current ``sys.stderr``, so that lines appear above a live progress bar.

    Rank 0 logs all lines, other ranks only warnings and errors.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(_VisibleFormatter("%(message)s"))
        self.addFilter(lambda record: record.levelno > logging.INFO or rank_zero_only.rank == 0)  # type: ignore[attr-defined]

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def show_log_lines() -> None:
    """Show the package's log lines, from level INFO, on standard error as bare messages.

    If the program has configured logging itself, only the package's level is set to INFO, unless it has a level.
    """
    logger = logging.getLogger("rlightning")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(_StandardError())


def _is_shown(record: logging.LogRecord) -> bool:
    """Return whether to log a message of Lightning's: a warning or an error, or a message of one of its callbacks."""
    return record.levelno > logging.INFO or "callbacks" in Path(record.pathname).parts


def quieten() -> None:
    """Hide Lightning's log messages about itself and its default loop.

    The summary at a run's start (:mod:`rlightning.module.start_block`) replaces Lightning's lines about devices, ranks
    and the model.
    """
    show_log_lines()
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).addFilter(_is_shown)
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it warns of kernels that do not fit the device or Python
    logging.getLogger("torch.utils._pytree").addFilter(_is_no_enum_line)
    for name in ("fabric.utilities.distributed", "fabric.utilities.seed", "pytorch.accelerators.cuda"):
        logging.getLogger(f"lightning.{name}").setLevel(logging.WARNING)  # a line of each rank
    ignore_warnings()
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(pydantic|torch)\b.*")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\b.*")


def _is_no_enum_line(record: logging.LogRecord) -> bool:
    return "Enum subclass" not in record.getMessage()


def ignore_warnings() -> None:
    """Ignore Lightning's warnings that do not apply to this package's modules, in any training loop."""
    for message in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
