"""Saves files and folders such that after a crash at any moment a complete version exists.

``.name.partial`` is written first; its name contains the process unless several processes write it. A file then
atomically replaces the old one. A folder cannot be replaced atomically: the old one is renamed to ``name.previous``,
the new one to ``name``, and ``name.previous`` is removed. At any moment ``name`` or ``name.previous`` is complete, and
:func:`find_saved` returns it.
"""

import glob
import os
import shutil
import socket
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".partial"
PREVIOUS = ".previous"
_HOST = f"{zlib.crc32(socket.gethostname().encode()):08x}"
"""Digest of this host's name: process ids are unique on one host only, and several may share a folder."""


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Context manager that yields a temporary path to write to; on success it is renamed to ``path``.

    Readers of ``path`` get the old content until then. The temporary file is removed if the context raises, and by a
    later call if the process was killed. Its name is unique to this process: if several processes write the same
    ``path``, the last one wins.
    """
    partial = own_partial_of(path)
    partial.parent.mkdir(parents=True, exist_ok=True)
    remove_dead_partials(path)
    try:
        yield partial
        swap_in(partial, path)
    finally:
        remove(partial)


def partial_of(path: Path) -> Path:
    """Return the hidden temporary path beside ``path``, which is the same for all processes."""
    return path.with_name(f".{path.name}{PARTIAL}")


def own_partial_of(path: Path) -> Path:
    """Return a hidden temporary path beside ``path`` that no other process uses."""
    return partial_of(path.with_name(f"{path.name}.{_HOST}-{os.getpid()}"))


def remove_dead_partials(path: Path) -> None:
    """Remove temporary files for ``path``: the shared one, this process's, and those of ended processes of the host."""
    remove(partial_of(path))
    for left in path.parent.glob(f".{glob.escape(path.name)}.{_HOST}-*{PARTIAL}"):
        process = left.name.removesuffix(PARTIAL).rpartition("-")[2]
        if process.isdecimal() and (int(process) == os.getpid() or not _is_running(int(process))):
            remove(left)


def prepare_partial(path: Path) -> Path:
    """Return the temporary path for ``path``, after creating its folder and removing earlier content."""
    partial = partial_of(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove(partial)
    return partial


def swap_in(partial: Path, path: Path) -> None:
    """Flush ``partial`` to the disk, and rename it to ``path``, in place of any earlier file or folder."""
    previous = Path(f"{path}{PREVIOUS}")
    _flush(partial)
    if _is_folder(path) or (partial.is_dir() and os.path.lexists(path)):
        remove(previous)
        path.rename(previous)
    partial.replace(path)
    _flush_entry(path.parent)
    remove(previous)


def find_saved(path: Path) -> Path:
    """Return ``path``, or the path of the previous version if a crash left only that one."""
    previous = Path(f"{path}{PREVIOUS}")
    return previous if previous.exists() and not path.exists() else path


def remove(path: Path) -> None:
    """Remove a file, a link or a folder; a folder is renamed first, so that no reader finds it incomplete."""
    if _is_folder(path):
        if path.suffix != PARTIAL:
            path = path.rename(prepare_partial(path))
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(folder: Path, suffix: str) -> None:
    """Remove the remains of crashes in ``folder``: partial files, and predecessors of existing files.

    Args:
        folder: may contain other files, which stay.
        suffix: suffix of the saved files, such as ``.ckpt``.
    """
    for path in folder.glob(f"*{suffix}*{PARTIAL}"):
        remove(path)
    for path in folder.glob(f"*{suffix}{PREVIOUS}"):
        if path.with_name(path.name.removesuffix(PREVIOUS)).exists():
            remove(path)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the process belongs to another user
        return True
    return True


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _flush(path: Path) -> None:
    """Flush a file or folder to the disk, so that after a power failure no file name lacks its data."""
    for part in [*path.rglob("*"), path] if path.is_dir() else [path]:
        _flush_entry(part)


def _flush_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
