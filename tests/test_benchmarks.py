"""The scripts of benchmarks/ say what they take, and measure a run from end to end."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = (
    *("make_model", "colocated_memory", "weak_scaling", "weight_sync", "offload", "learning_curves"),
    *("gathering", "sharded_loading"),
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_benchmark_says_what_it_takes(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert f" benchmarks/{name}.py" in done.stdout  # the command, from its docstring
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_memory_is_traced_by_step_through_the_real_command(tmp_path: Path) -> None:
    options = (
        "--device cpu --model tiny --steps 2 --arms before_wake_too --prompts 2 --samples 2 --shortest 4 --longest 40"
    )
    command = [sys.executable, str(BENCHMARKS / "colocated_memory.py"), *options.split(), "--out", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("| run | steps | ")
    out = tmp_path / "out"
    assert (out / "table.md").read_text() == done.stdout
    assert {path.name for path in out.glob("*.*")} >= {"table.csv", "steps.csv", "steps.md", "curve.svg"}
    with (out / "before_wake_too" / "after-0.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["moment"]) for row in rows] == [
        (step, moment) for step in "12" for moment in ("sync_start", "sync_end", "rollout_end", "update_end")
    ]
    lengths = [int(row["max_new_tokens"]) for row in rows]
    assert all(4 <= length <= 40 for length in lengths) and len(set(lengths)) > 1
