"""Scratch folders of processes that end in any way."""

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from disks import failing

from rlightning.processes.scratch import SHARED_MEMORY, ScratchFolder

HOLD = """
import sys, time
from rlightning.processes.scratch import ScratchFolder
folders = [ScratchFolder("test"), ScratchFolder("test")]
print(*(folder.path for folder in folders), flush=True)
time.sleep(600)
"""


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # short enough to be used
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


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


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_disk_without_locks_keeps_the_folders_of_others(
    number: int, parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(number))
    first, second = ScratchFolder("test"), ScratchFolder("test")
    assert sorted(parent.iterdir()) == sorted([first.path, second.path])
    for folder in (first, second):
        folder.remove()
    assert not list(parent.iterdir())


def test_other_errors_of_a_lock_are_raised(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        ScratchFolder("test")
