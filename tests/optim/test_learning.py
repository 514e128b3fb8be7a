"""The benchmark of what smaller moments cost in learning, shortened, through the real command."""

import math
from pathlib import Path

import pytest
from programs import read_csv, run_python

pytestmark = pytest.mark.processes

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "optimizer_states.py"


def test_final_losses_are_shown_by_seed(tmp_path: Path) -> None:
    """A run alone; a random model is as good as guessing one of 15 characters, which takes log(15) nats."""
    options = ["--device", "cpu", "--states", "8bit", "--seeds", "3", "--steps", "2", "--out", "out"]
    run_python(BENCHMARK, *options, folder=tmp_path)
    [row] = read_csv(tmp_path / "out" / "table.csv")
    assert row["optimizer_states"] == "8bit"
    assert float(row["loss"]) == float(row["by seed"]) == pytest.approx(math.log(15), rel=0.1)
