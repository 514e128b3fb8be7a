"""Writes checkpoint files such that the last complete checkpoint survives a crash and can be found."""

import io
import logging
import os
import pickle
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from rlightning.atomic_save import PREVIOUS, find_saved, partial_of, remove, remove_leftovers, written_aside
from rlightning.checksums import DamagedError, seal_file, verify_file
from rlightning.disk import needed
from rlightning.foreign_text import describe_error
from rlightning.parallel.checkpoint_folder import META, is_checkpoint_folder, read_whole, verify_checkpoint_folder
from rlightning.parallel.collectives import global_rank
from rlightning.protocols import StateDict

log = logging.getLogger(__name__)

SUFFIX = ".ckpt"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning plugin that writes checkpoint files atomically, with a checksum, and also reads sharded folders.

    Lightning makes a second copy in memory and writes it to the system's temporary folder, which may be on another
    disk, so that the file is copied, not renamed. URLs (``s3://...``) are left to Lightning.

        Trainer(plugins=[AtomicCheckpointIO()], ...)
    """

    def save_checkpoint(self, checkpoint: dict[str, object], path: str | Path, storage_options: object = None) -> None:
        """Write a checkpoint to one file; called on rank 0 only. If a SaveError (a full disk) is raised, an earlier
        file at ``path`` is kept.
        """
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        with saving_checkpoint(path), written_aside(path) as partial:
            remove_leftovers(path.parent, SUFFIX)
            torch.save(checkpoint, partial)
            seal_file(partial)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> StateDict:
        """Read a whole checkpoint (file or sharded folder); raise a DamagedError if rank 0 finds a wrong checksum."""
        if "://" not in str(path):
            path = find_saved(Path(path))
            if global_rank() == 0:
                verify_checkpoint(path)
            if is_checkpoint_folder(path):
                return read_whole(path, weights_only)
        return super().load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint (file or folder); links to it, such as ``last.ckpt``, then point to the newest other."""
        if "://" in str(path):
            super().remove_checkpoint(path)
            return
        path = Path(path)
        for link in path.parent.glob(f"*{SUFFIX}"):
            newest = newest_checkpoint(path.parent, but=path)
            if link.is_symlink() and link.resolve() == path.resolve() and link != path and newest is not None:
                relink(link, newest)
        remove(path)
        remove(Path(f"{path}{PREVIOUS}"))


@contextmanager
def saving_checkpoint(path: Path) -> Iterator[None]:
    """Context manager for writing a checkpoint: an error removes the partial file or folder.

    A disk error becomes a SaveError whose text names the folder's newest complete checkpoint.
    """
    last = newest_checkpoint(path.parent)
    kept = f"The last good one is '{last}'." if last is not None else "There is none before it."
    with needed("The checkpoint", path, f"{kept} Make room there, or name another folder, and go on from it."):
        try:
            yield
        except BaseException:
            with suppress(OSError):
                remove(partial_of(path))
            raise


def newest_checkpoint(folder: Path, *, but: Path | None = None) -> Path | None:
    """Return the complete checkpoint in ``folder``, except ``but``, that was written last; None if there is none.

    It may be a file or a folder; symbolic links are ignored.
    """
    found = [path for path in folder.glob(f"*{SUFFIX}") if not path.is_symlink() and path != but and is_whole(path)]
    return max(found, key=_written_at, default=None)


class SavedState(NamedTuple):
    """A checkpoint's path, the step after which it was saved, and whether it has the optimizer's state to resume."""

    path: Path
    step: int
    is_resumable: bool


def read_state(path: Path) -> SavedState | None:
    """Return a checkpoint's step, and whether it has optimizer states, without reading tensors; return None, and log
    why, if it cannot be read.
    """
    try:
        checkpoint = read_plain(path / META if path.is_dir() else path)
        return SavedState(path, int(checkpoint["global_step"]), "optimizer_states" in checkpoint)
    except Exception as error:  # a truncated file may raise any exception
        log.warning("%s is no checkpoint that can be read, and is skipped: %s.", path, _why_unreadable(path, error))
        return None


def _why_unreadable(path: Path, error: Exception) -> str:
    """Return why a checkpoint cannot be read, from the ``error`` that was raised."""
    try:
        verify_checkpoint(path)
    except DamagedError as damage:
        return damage.reason
    except Exception as other:
        error = other
    return describe_error(error)


def verify_checkpoint(path: Path) -> None:
    """Verify the checksums of a checkpoint, a file or a folder; a second time only if its files have changed.

    Raises a DamagedError if the checkpoint differs from what was written.
    """
    path = path.resolve()
    parts = sorted(path.rglob("*")) if path.is_dir() else [path]
    stats = [(part, part.stat()) for part in parts]
    _verify(path, tuple((part, stat.st_size, stat.st_mtime_ns, stat.st_ino) for part, stat in stats))


@lru_cache
def _verify(path: Path, state: tuple[object, ...]) -> None:
    """Verify a checkpoint by its checksums, unless this was done for the same ``state`` of its files."""
    if path.is_dir():
        verify_checkpoint_folder(path)
    else:
        verify_file(path)


def list_checkpoints(folder: Path, max_depth: int = 0) -> list[Path]:
    """Return the paths of checkpoints in a folder and its subfolders down to ``max_depth``, complete or not.

    If a crash left a checkpoint's previous version and no complete new one, the previous version is included.
    """
    found: list[Path] = []
    for depth in range(max_depth + 1):
        below = "*/" * depth
        for path in sorted([*folder.glob(f"{below}*{SUFFIX}"), *folder.glob(f"{below}*{SUFFIX}{PREVIOUS}")]):
            name = path.with_name(path.name.removesuffix(PREVIOUS))
            if path.exists() and (path == name or not is_whole(name)):
                found.append(path)
    return found


def latest_checkpoint(paths: Iterable[Path], *, to_resume: bool = False, verifies: bool = True) -> SavedState | None:
    """Return the undamaged checkpoint of the highest step; None if there is none. Log which ones are skipped.

    Args:
        paths: from :func:`list_checkpoints`. A link is preferred to its target.
        to_resume: whether to leave out checkpoints that contain only weights.
        verifies: whether checksums are compared. Steps are read from the files, since copying changes file times.
    """
    names: dict[Path, Path] = {}
    for path in paths:
        if path.is_symlink() or path.resolve() not in names:
            names[path.resolve()] = path
    states = [state for path in names.values() if (state := read_state(path)) is not None]
    states.sort(key=lambda state: (state.step, state.path.name.startswith("last"), _written_at(state.path)))
    for state in reversed(states):
        if to_resume and not state.is_resumable:
            log.info("%s, saved after step %d, is skipped: it holds weights alone.", state.path, state.step)
            continue
        try:
            if verifies:
                verify_checkpoint(state.path)
        except DamagedError as error:
            log.warning("%s, saved after step %d, is skipped: %s.", state.path, state.step, error.reason)
        else:
            return state
    return None


def last_checkpoint(folder: Path) -> Path | None:
    """Return the path of the undamaged checkpoint with the highest step in a folder; None if there is none."""
    latest = latest_checkpoint(list_checkpoints(folder))
    return None if latest is None else latest.path


def relink(link: Path, target: Path) -> None:
    """Point the symbolic link ``link`` to ``target`` in the same folder, atomically."""
    partial = partial_of(link)
    partial.unlink(missing_ok=True)
    partial.symlink_to(os.path.relpath(target, link.parent))
    partial.replace(link)


def is_whole(path: Path) -> bool:
    """Return whether a path is an existing file, or a folder with a complete sharded checkpoint; links are followed."""
    return path.is_file() or is_checkpoint_folder(path)


def _written_at(path: Path) -> float:
    return path.stat().st_mtime


class Inert(dict[object, object]):
    """Placeholder for any class, function or object in a pickle: calling it runs nothing; dict entries are kept."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def __call__(self, *_: object, **__: object) -> "Inert":
        """Return another :class:`Inert`, in place of a call's result or a new object."""
        return Inert()

    __setstate__ = append = extend = add = __call__
    __hash__ = object.__hash__  # type: ignore[assignment]


class PlainUnpickler(pickle.Unpickler):
    """Unpickler of numbers, texts, lists, tuples and dictionaries only; anything else becomes :class:`Inert`."""

    def find_class(self, module: str, name: str) -> type[Inert]:
        """Return :class:`Inert` instead of importing a class."""
        return Inert

    def persistent_load(self, key: object) -> Inert:
        """Return :class:`Inert` instead of reading a tensor."""
        return Inert()


def read_plain(path: Path) -> StateDict:
    """Return the content of a file from ``torch.save``, in which tensors and other objects become :class:`Inert`.

    Raises:
        zipfile.BadZipFile: the file is not from ``torch.save``, or the CRC-32 of its pickle is wrong.
        pickle.UnpicklingError: the pickle cannot be read.
    """
    with zipfile.ZipFile(path) as file:
        name = next((name for name in file.namelist() if name.endswith("/data.pkl")), None)
        if name is None:
            raise zipfile.BadZipFile("it has no data.pkl")
        found: StateDict = PlainUnpickler(io.BytesIO(file.read(name))).load()
        return found
