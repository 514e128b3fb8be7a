"""Starting a script as a controller: a process of its own, because a process keeps its mode."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import rank_processes
from rank_processes import TESTS

FOLDERS = [str(TESTS), str(TESTS / "callbacks"), str(TESTS / "distributed")]
PATHS = os.pathsep.join([*FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])])


def start_ranks(script: Path, num_ranks: int, *args: str) -> "list[subprocess.Popen[str]]":
    """Run a script on several ranks, with all that it may import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PATHS)
        return rank_processes.start_ranks(script, num_ranks, *args)


def start_controller(script: Path, *args: str) -> "subprocess.Popen[str]":
    """Run a Python script as one process without a rank, as one that makes a RayController is."""
    return subprocess.Popen(
        [sys.executable, str(script), *args],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(processes: "list[subprocess.Popen[str]]", timeout: float = 500) -> None:
    """Wait for processes that have to end well; the others are ended when one does not."""
    try:
        for process in processes:
            _, error = process.communicate(timeout=timeout)
            assert process.returncode == 0, error
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()  # a controller ends its cluster
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
