"""Saves files and folders such that after a crash at any moment a complete version is found.

``.name.partial`` is written first, with the process in its name where no other takes part. A file then takes the place
of the old one in one step. No call of Python's replaces a folder, so there the old one becomes ``name.previous``, the
new one takes its name, and ``name.previous`` is removed: at each moment ``name`` or ``name.previous`` is whole, and
:func:`find_saved` says which.
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
    """Context that gives a temporary path to write to; on success it is renamed to ``path``.

    Readers of ``path`` get the old content until then, never half of the new one. A block that raises leaves nothing;
    what a kill leaves is removed the next time. The name is this process's own: of several that write the same
    ``path``, the last one counts.
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
    """Return the hidden temporary path beside ``path`` to which it is written first."""
    return path.with_name(f".{path.name}{PARTIAL}")


def own_partial_of(path: Path) -> Path:
    """Return a temporary path for ``path`` that no other process uses."""
    return partial_of(path.with_name(f"{path.name}.{_HOST}-{os.getpid()}"))


def remove_dead_partials(path: Path) -> None:
    """Remove temporary files of ``path`` that this process or ended processes of this host have left."""
    remove(partial_of(path))
    for left in path.parent.glob(f".{glob.escape(path.name)}.{_HOST}-*{PARTIAL}"):
        process = left.name.removesuffix(PARTIAL).rpartition("-")[2]
        if process.isdecimal() and (int(process) == os.getpid() or not _is_running(int(process))):
            remove(left)


def prepare_partial(path: Path) -> Path:
    """Return the temporary path for ``path``, with its folder made and earlier content removed."""
    partial = partial_of(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove(partial)
    return partial


def swap_in(partial: Path, path: Path) -> None:
    """Rename ``partial`` to its final path, in place of any earlier file or folder."""
    previous = Path(f"{path}{PREVIOUS}")
    _flush(partial)
    if _is_folder(path) or (partial.is_dir() and os.path.lexists(path)):
        remove(previous)
        path.rename(previous)
    partial.replace(path)
    _flush_entry(path.parent)
    remove(previous)


def find_saved(path: Path) -> Path:
    """Return ``path``, or if a crash left only its predecessor, the predecessor's path."""
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
        folder: may hold other files, which stay.
        suffix: of what is saved there, such as ``.ckpt``.
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
    except PermissionError:  # another user's
        return True
    return True


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _flush(path: Path) -> None:
    """Flush a file or folder to the disk, so that after a power failure no name lacks its data."""
    for part in [*path.rglob("*"), path] if path.is_dir() else [path]:
        _flush_entry(part)


def _flush_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
