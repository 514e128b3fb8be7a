"""Folders that take no files for a while: on a full disk, on a read-only one, or gone."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Never

import pytest

Kind = Literal["full", "read-only", "removed"]
DISK_BYTES = 2 << 20


def failing(number: int) -> Callable[..., Never]:
    """A call of the system's that raises its error of a number."""

    def fail(*arguments: object) -> Never:
        raise OSError(number, os.strerror(number))

    return fail


class Disk:
    """A folder that can be broken and repaired.

    Args:
        folder: on a disk of its own of :data:`DISK_BYTES`, but for "removed".
        kind: how it breaks.
    """

    def __init__(self, folder: Path, kind: Kind) -> None:
        self.folder, self.kind = folder, kind

    def break_down(self) -> None:
        """Let it take no more files."""
        if self.kind == "full":
            with (self.folder / "full").open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    pass
        elif self.kind == "read-only":
            _remount(self.folder, "ro")
        else:
            shutil.rmtree(self.folder)
            self.folder.touch()  # root may write anywhere, but not into a file's folder

    def repair(self) -> None:
        """Let it take files again."""
        if self.kind == "full":
            (self.folder / "full").unlink()
        elif self.kind == "read-only":
            _remount(self.folder, "rw")
        else:
            self.folder.unlink()


@contextmanager
def made_disk(tmp_path: Path, kind: Kind) -> Iterator[Disk]:
    """A disk in a test's folder; skips where none may be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if kind == "removed":
        yield Disk(folder, kind)
        return
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("takes the right to mount a disk")
    try:
        yield Disk(folder, kind)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _remount(folder: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True)
