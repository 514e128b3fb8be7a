"""Rows of a table that several calls of a benchmark fill, one after the other."""

import json
from pathlib import Path
from typing import Any

from launch import Rows


class KeptRows:
    """Rows that are on disk as soon as they are there; a later call with the same ``--out`` has them too.

    Args:
        folder: of the benchmark's output; gets ``rows.json``.
        keys: the columns that tell rows apart: a new row replaces the one that has the same values in them.
    """

    def __init__(self, folder: Path, *keys: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.keys = folder / "rows.json", keys
        self.rows: Rows = json.loads(self.path.read_text()) if self.path.is_file() else []

    def put(self, row: dict[str, Any]) -> None:
        """Add a row, or replace one."""
        mine = [row[key] for key in self.keys]
        self.rows = [old for old in self.rows if [old[key] for key in self.keys] != mine]
        self.rows.append(row)
        self.path.write_text(json.dumps(self.rows))
