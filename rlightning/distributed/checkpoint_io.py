"""Checkpoints on a disk, such that a crash leaves the last good one in place and found."""

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from rlightning.atomic_save import PREVIOUS, find_saved, partial_of, remove, remove_leftovers, written_aside
from rlightning.distributed.checkpoint_folder import is_checkpoint_folder, read_whole

SUFFIX = ".ckpt"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files, written aside first, then renamed; sharded folders are read too.

    Lightning itself builds a second copy in memory and writes it to the system's temporary folder, from where it is
    copied, not renamed, if that is another disk. Addresses (``s3://...``) are left to Lightning.

        Trainer(plugins=[AtomicCheckpointIO()], ...)
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a single file; called on rank 0 only."""
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        remove_leftovers(path.parent, SUFFIX)
        with written_aside(path) as partial:
            torch.save(checkpoint, partial)

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        """Read a single file, or the whole of a sharded folder."""
        if "://" not in str(path):
            path = find_saved(Path(path))
            if is_checkpoint_folder(path):
                return read_whole(path, weights_only)
        return super().load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file or a folder; links to it, such as ``last.ckpt``, lead to the newest one that is left."""
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


def newest_checkpoint(folder: Path, *, but: Path | None = None) -> Path | None:
    """The checkpoint that was written last, a file or a folder; links do not count."""
    found = [path for path in folder.glob(f"*{SUFFIX}") if not path.is_symlink() and path != but and is_whole(path)]
    return max(found, key=_written_at, default=None)


def last_checkpoint(folder: Path) -> Path | None:
    """What ``last`` stands for: ``last.ckpt`` or, where a crash has taken that, the newest checkpoint that is whole.

    A crash may also have taken what ``last.ckpt`` leads to, and left its predecessor under another name.

    Args:
        folder: the checkpoints'.
    """
    lasts = [find_saved(path) for path in (folder / f"last{SUFFIX}", *sorted(folder.glob(f"last-v*{SUFFIX}")))]
    lasts = [path for path in lasts if is_whole(path)]
    if lasts:
        return max(lasts, key=_written_at)
    found = [newest_checkpoint(folder), *folder.glob(f"*{SUFFIX}{PREVIOUS}")]
    return max((path for path in found if path is not None and is_whole(path)), key=_written_at, default=None)


def relink(link: Path, target: Path) -> None:
    """Have ``link`` lead to ``target`` beside it, without a moment in which it leads nowhere."""
    partial = partial_of(link)
    partial.unlink(missing_ok=True)
    partial.symlink_to(os.path.relpath(target, link.parent))
    partial.replace(link)


def is_whole(path: Path) -> bool:
    """Whether it is a file, or a folder of which nothing is missing; links count as what they lead to."""
    return path.is_file() or is_checkpoint_folder(path)


def _written_at(path: Path) -> float:
    return path.stat().st_mtime
