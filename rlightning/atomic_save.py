"""Saving a file or a folder so that a crash at any moment leaves a whole one, and that one is found.

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
"""Process ids are of one host, and a folder may be of several."""


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Give a name to write a file or a folder to; it becomes ``path`` when the block ends well.

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
    """Where what will be ``path`` is written first: beside it, and hidden from who reads the whole folder."""
    return path.with_name(f".{path.name}{PARTIAL}")


def own_partial_of(path: Path, process: int | None = None) -> Path:
    """Where this process alone, or another of this host, writes what will be ``path``."""
    return partial_of(path.with_name(f"{path.name}.{_HOST}-{process or os.getpid()}"))


def remove_dead_partials(path: Path) -> None:
    """Remove what killed processes of this host, or this one, have left of ``path``."""
    remove(partial_of(path))
    for left in path.parent.glob(f".{glob.escape(path.name)}.{_HOST}-*{PARTIAL}"):
        process = left.name.removesuffix(PARTIAL).rpartition("-")[2]
        if process.isdecimal() and (int(process) == os.getpid() or not _is_running(int(process))):
            remove(left)


def prepare_partial(path: Path) -> Path:
    """Where to write what will be ``path``; nothing is there, but the folder around it is."""
    partial = partial_of(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove(partial)
    return partial


def swap_in(partial: Path, path: Path) -> None:
    """Give what was written to ``partial`` its name; whatever had that name is gone then."""
    previous = Path(f"{path}{PREVIOUS}")
    _flush(partial)
    if _is_folder(path) or (partial.is_dir() and os.path.lexists(path)):
        remove(previous)
        path.rename(previous)
    partial.replace(path)
    _flush_entry(path.parent)
    remove(previous)


def find_saved(path: Path) -> Path:
    """``path``, or what a crash left of it: its predecessor under another name. If there is neither, ``path``."""
    previous = Path(f"{path}{PREVIOUS}")
    return previous if previous.exists() and not path.exists() else path


def remove(path: Path) -> None:
    """Remove a file, a link or a folder; a folder is renamed first, so that no reader finds half of it."""
    if _is_folder(path):
        if path.suffix != PARTIAL:
            path = path.rename(prepare_partial(path))
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(folder: Path, suffix: str) -> None:
    """Remove what crashes left in ``folder``: parts, and predecessors of what is there itself.

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
    """Bring it to the disk: in a power cut, what has a name must have its data too."""
    for part in [*path.rglob("*"), path] if path.is_dir() else [path]:
        _flush_entry(part)


def _flush_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
