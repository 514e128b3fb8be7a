"""Scratch folders of processes that end in any way."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rlightning.scratch import SHARED_MEMORY, ScratchFolder

HOLD = """
import sys, time
from rlightning.scratch import ScratchFolder
folders = [ScratchFolder("test"), ScratchFolder("test")]
print(*(folder.path for folder in folders), flush=True)
time.sleep(600)
"""


@pytest.fixture
def parent(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.processes
def test_next_process_removes_folders_of_dead_ones_only(parent: Path) -> None:
    own = ScratchFolder("test")
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        theirs = [Path(name) for name in process.stdout.readline().split()]
        (theirs[0] / "vllm_dist_of_a_test").touch()
        segment = SHARED_MEMORY / "vllm_dist_of_a_test-tp-[0-1]-cpushm"
        segment.touch()
        other = SHARED_MEMORY / "vllm_dist_of_another-tp-[0-1]-cpushm"
        other.touch()
        ScratchFolder("test").remove()
        assert all(folder.is_dir() for folder in (own.path, *theirs)) and segment.exists()
        process.kill()
    try:
        new = ScratchFolder("test")
        assert sorted(parent.iterdir()) == sorted([own.path, new.path])
        assert not segment.exists() and other.exists()
    finally:
        other.unlink()
    for folder in (own, new):
        folder.remove()
        folder.remove()
    assert not list(parent.iterdir())


def test_folder_of_a_long_parent_is_in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = ScratchFolder("test")
    assert folder.path.parent == Path("/tmp") and os.fspath(folder) == str(folder.path)
    folder.remove()
