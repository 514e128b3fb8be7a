"""What conftest.py makes of tests that start processes without the marker, or leave them behind."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

HERE = Path(__file__).parent
TESTS = """\
import os, subprocess, sys, time
import child_processes, pytest

child_processes.LEAVE_SECONDS = 1.0

@pytest.fixture(scope="module")
def program():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()

def test_fixture_starts(program): ...

def test_starts_by_name():
    subprocess.run(["python", "-c", ""])

@pytest.mark.processes
def test_leaves_child():
    subprocess.Popen(["sleep", "601"], start_new_session=True)

@pytest.mark.processes
def test_leaves_fork():
    pid = os.fork()
    if pid == 0:
        os.execvp("sleep", ["sleep", "602"])
    while not child_processes.read_command(pid).startswith("sleep"):
        time.sleep(0.01)

@pytest.mark.processes
def test_leaves_nothing():
    subprocess.run(["sleep", "0"])
"""


def run_tests(folder: Path, *options: str) -> tuple[str, dict[str, int]]:
    """Return pytest's output on these tests, and its counts by outcome."""
    (folder / "test_it.py").write_text(TESTS)
    variables = {
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-c", os.devnull, "-q", "-rN", *options, "test_it.py"]
    done = subprocess.run(command, cwd=folder, env=os.environ | variables, capture_output=True, text=True, check=False)
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    return done.stdout + done.stderr, counts


def test_unmarked_start_by_fixture_or_name_fails(tmp_path: Path) -> None:
    text, counts = run_tests(tmp_path, "-m", "not processes")
    assert counts == {"failed": 1, "error": 1}, text
    assert re.search(r"The setup of this test starts a process: mark it by @pytest\.mark\.processes", text)
    assert re.search(r"The call of this test starts a process", text)


def test_child_left_behind_fails_with_its_command(tmp_path: Path) -> None:
    text, counts = run_tests(tmp_path, "-k", "leaves")
    assert counts == {"passed": 3, "error": 2}, text
    assert re.findall(r"^\d+: (sleep \d+)$", text, re.MULTILINE) == ["sleep 601", "sleep 602"]
