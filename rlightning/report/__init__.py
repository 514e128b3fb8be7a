"""The HTML report of a run, and the other files with its metrics and trajectories."""

from rlightning.report.history import History
from rlightning.report.page import Run, render

__all__ = ["History", "Run", "render"]
