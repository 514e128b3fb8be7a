"""The page that a run leaves behind: its history, the charts, the HTML."""

from rlightning.report.history import History
from rlightning.report.page import Run, render

__all__ = ["History", "Run", "render"]
