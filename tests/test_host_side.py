"""benchmarks/host_side.py, engine_output.py and scheduling.py measure the real parts, at tiny sizes."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "host_side.py"


def run(folder: Path, *options: str, script: Path = SCRIPT) -> str:
    """What the script says when it is run in ``folder``."""
    command = [sys.executable, str(script), *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_says_what_it_takes(tmp_path: Path) -> None:
    assert "python benchmarks/host_side.py" in run(tmp_path, "--help")
    assert list(tmp_path.iterdir()) == []


def test_every_part_is_measured(tmp_path: Path) -> None:
    said = run(tmp_path, "--sizes", "80x20", "--repetitions", "1", "--out", "out")
    assert said.startswith("| part | ns at 80x20 | growth | ")
    with (tmp_path / "out" / "measurements.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(said.strip().splitlines()) - 2  # without the head and its line
    assert all(int(row["tokens"]) > 0 and float(row["seconds"].strip("[]")) > 0 for row in rows)


def test_two_checkouts_are_compared(tmp_path: Path) -> None:
    before = str(SCRIPT.parent.parent)
    said = run(tmp_path, "--sizes", "80x20", "--parts", "pack", "--before", before, "--repetitions", "1")
    assert said.startswith("| part | before, s | now, s | times faster | ")
    assert said.splitlines()[2].startswith("| pack | ")


def test_both_ends_of_an_engine_are_measured(tmp_path: Path) -> None:
    options = ["--sequences", "4", "--tokens", "4", "--repetitions", "1"]
    said = run(tmp_path, *options, script=SCRIPT.with_name("engine_output.py")).strip().splitlines()[-6:]
    assert said[0].startswith("| output | core, us | front, us | text, us | ")
    assert said[2].startswith("| text in the end | ")


def test_schedulers_are_measured(tmp_path: Path) -> None:
    options = ["--sequences", "4", "--steps", "4", "--repetitions", "1"]
    said = run(tmp_path, *options, script=SCRIPT.with_name("scheduling.py")).strip().splitlines()[-4:]
    assert said[0] == "| scheduler | schedule | take in | write | all |"
    assert [line.split(" | ")[0] for line in said[2:]] == ["| vLLM's own", "| rlightning's"]
