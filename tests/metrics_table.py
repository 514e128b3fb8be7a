"""The table of docs/metrics.md, as something to check names against."""

import re
from collections.abc import Iterable
from pathlib import Path

TABLE = Path(__file__).parents[1] / "docs" / "metrics.md"
NOT_METRICS = {"step", "epoch"}
"""Columns that Lightning's loggers write beside the metrics."""


def documented_names() -> list[str]:
    """The names of the table, with their ``<placeholders>``."""
    return re.findall(r"^\| `([^`]+)` \|", TABLE.read_text(encoding="utf-8"), flags=re.MULTILINE)


def undocumented(names: Iterable[str]) -> list[str]:
    """Those of ``names`` that no row of the table describes; ``test/`` counts as ``val/``."""
    patterns = [re.sub(r"<\w+>", "[^/]+", re.escape(name)) for name in documented_names()]
    known = re.compile("|".join(patterns))
    return sorted({n for n in names if not known.fullmatch(re.sub("^test/", "val/", n))} - NOT_METRICS)
