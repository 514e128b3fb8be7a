"""Python programs that tests run to their end, and the CSV files that runs write."""

import csv
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_python(
    *command: str | Path, folder: Path | None = None, environment: Mapping[str, str] | None = None, exit_code: int = 0
) -> "subprocess.CompletedProcess[str]":
    """Run a Python program in ``folder``; an exit code other than ``exit_code`` is shown with all that it wrote."""
    line = [sys.executable, *command]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == exit_code, done.stdout + done.stderr
    return done


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows, by column."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def steps_with(rows: Sequence[Mapping[str, str]], column: str) -> list[int]:
    """The steps of the rows that have a value in a column."""
    return [int(row["step"]) for row in rows if row.get(column)]


def logged_steps(folder: Path, column: str = "policy/loss") -> list[int]:
    """The steps at which the one ``metrics.csv`` below ``folder`` has a value in a column."""
    (path,) = folder.rglob("metrics.csv")
    return steps_with(read_csv(path), column)
