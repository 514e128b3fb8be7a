"""The benchmark of what smaller moments cost in learning, shortened, through the real command."""

import csv
import math
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "optimizer_states.py"


def test_final_losses_are_shown_by_seed(tmp_path: Path) -> None:
    """A run alone; a random model is as good as guessing one of 15 characters, which takes log(15) nats."""
    options = ["--device", "cpu", "--states", "8bit", "--seeds", "3", "--steps", "2", "--out", "out"]
    command = [sys.executable, str(BENCHMARK), *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "out" / "table.csv").open(newline="") as file:
        [row] = csv.DictReader(file)
    assert row["optimizer_states"] == "8bit"
    assert float(row["loss"]) == float(row["by seed"]) == pytest.approx(math.log(15), rel=0.1)
