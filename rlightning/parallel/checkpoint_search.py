"""Finds the checkpoints of a run's folder, and the one that ``--ckpt_path last`` stands for."""

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from rlightning.atomic_save import find_saved
from rlightning.checksums import DamagedError
from rlightning.config.files import read_keys
from rlightning.error_report import is_other_rank
from rlightning.errors import ConfigError
from rlightning.parallel.checkpoint_io import SavedState, latest_checkpoint, list_checkpoints, verify_checkpoint

log = logging.getLogger(__name__)

FOLDER = "checkpoints"
"""Folder of checkpoints within a run's folder, if a ``ModelCheckpoint`` has no ``dirpath``."""
FOLDER_DEPTH = 4
"""Levels of this folder that are searched, independent of the configuration, since all of it belongs to the run."""


def find_places(root: Path, callbacks: object) -> dict[Path, int]:
    """Return the folders to which the run in ``root`` saves checkpoints, by its saved and its current configuration.

    Args:
        callbacks: ``trainer.callbacks`` of the configuration: class paths with their arguments; or the objects.

    Returns:
        For the ``dirpath`` of each ``ModelCheckpoint``, or its default, the number of folder levels below it that may
        contain checkpoints: metric names in ``filename`` may have slashes.
    """
    places = {root / FOLDER: FOLDER_DEPTH}
    moved = set()
    for former_root, entries in [*_saved_callbacks(root), (None, callbacks)]:
        for written, depth in _find_folders(entries):
            folder = written or root / FOLDER
            if written and former_root:
                folder = _locate(written, former_root, root)
                moved |= {written} if folder.is_dir() and folder.resolve() != written.resolve() else set()
            elif written in moved:
                continue  # this run is a copy of the run whose folder the file names
            places[folder] = max(depth, places.get(folder, 0))
    return places


def settle_checkpoint(command: str, root: Path, callbacks: object, ckpt_path: str | None) -> str | None:
    """Check ``ckpt_path``, and return it; for "last", return the path of the run's checkpoint with the highest step.

    Args:
        command: the command's name; ``fit`` rejects a folder with another run's checkpoints.
        root: folder of the run.
        callbacks: callbacks of the run; see :func:`find_places`.
        ckpt_path: the user's option: a path or URL, "last", "best", or None to load no checkpoint.

    Raises:
        ConfigError: the checkpoint is missing or damaged, or the folder belongs to another run.
    """
    places = find_places(root, callbacks)
    check_checkpoints(command, root, places, ckpt_path)
    if ckpt_path != "last":
        return ckpt_path
    last = find_last(command, places)
    log.info("ckpt_path=last is %s, saved after step %d.", last.path, last.step)
    return str(last.path)


def check_checkpoints(command: str, root: Path, places: Mapping[Path, int], ckpt_path: str | None) -> None:
    """Raise a ConfigError if ``ckpt_path`` cannot be loaded, or a new run would use another run's folders.

    It cannot be loaded if it is missing or damaged, or is "best", which only the finished run knew.
    """
    if ckpt_path is None:
        saved = _list(places) if command == "fit" else []
        if saved:
            key = "trainer.default_root_dir" if root in saved[0].parents else "dirpath of ModelCheckpoint"
            holder = root if root in saved[0].parents else saved[0].parent
            raise ConfigError(
                f"{key}={holder} holds a run's checkpoints already, such as {saved[0].name}. Continue that run with "
                f"--ckpt_path last (in Python: fit(..., ckpt_path='last')), or set another {key}."
            )
    elif ckpt_path == "best":
        saved = _list(places)
        raise ConfigError(
            "ckpt_path=best: which one that is only the run itself knew. "
            + (f"Name one, such as {saved[0]}." if saved else "Name one by its path.")
        )
    elif ckpt_path not in ("last", "hpc") and "://" not in ckpt_path:
        _check_named(find_saved(Path(ckpt_path)))


def _check_named(path: Path) -> None:
    if not path.exists():
        raise ConfigError(f"ckpt_path={path}: there is no such file. Paths count from the current folder.")
    try:
        if is_rank_0():
            verify_checkpoint(path)
    except DamagedError as error:
        raise ConfigError(
            f"ckpt_path={path} is damaged: {error.reason}. --ckpt_path last takes the newest one that is not; or name "
            "another."
        ) from error


def find_last(command: str, places: Mapping[Path, int]) -> SavedState:
    """Return the undamaged checkpoint with the highest step in ``places``, or raise a ConfigError if there is none.

    Only rank 0 compares checksums, and all ranks load its checkpoint.

    Args:
        command: ``fit`` needs a checkpoint with the optimizer's state.
        places: from :func:`find_places`.
    """
    saved = _list(places)
    latest = latest_checkpoint(saved, to_resume=command == "fit", verifies=is_rank_0())
    if latest is not None:
        return latest
    searched = " or ".join(map(str, places))
    if saved:
        raise ConfigError(
            f"ckpt_path=last: no checkpoint in {searched} can be continued: they are damaged, or hold weights alone "
            "(save_weights_only). Name one by its path."
        )
    start = "continue, or leave out --ckpt_path to start anew" if command == "fit" else command
    raise ConfigError(
        f"ckpt_path=last, but there is no checkpoint in {searched}. "
        f"Set trainer.default_root_dir to the folder of the run to {start}."
    )


def is_rank_0() -> bool:
    """Return whether this process is or will be rank 0, according to the launchers' environment variables."""
    return not is_other_rank() and os.environ.get("NODE_RANK", "0") == "0"


def _list(places: Mapping[Path, int]) -> list[Path]:
    return [path for folder, depth in places.items() for path in list_checkpoints(folder, depth)]


def _saved_callbacks(root: Path) -> Iterator[tuple[Path, object]]:
    """Yield the run's folder and the callbacks of each configuration that was saved in ``root``."""
    for file in sorted(root.glob("config*.yaml")):
        try:
            trainer = read_keys(str(file)).get("trainer")
        except ConfigError:  # a user's file of this name, as are files without the keys
            continue
        if isinstance(trainer, Mapping):
            former_root = trainer.get("default_root_dir")
            yield Path(former_root if isinstance(former_root, str) else root).expanduser(), trainer.get("callbacks")


def _find_folders(callbacks: object) -> Iterator[tuple[Path | None, int]]:
    """Yield the ``dirpath`` of each configured ``ModelCheckpoint``, and the folder levels in its file names."""
    entries: list[Any] = callbacks if isinstance(callbacks, list) else [callbacks]
    for entry in entries:
        if isinstance(entry, ModelCheckpoint) and entry.dirpath:
            yield Path(entry.dirpath), str(entry.filename or "").count("/")
        has_keys = hasattr(entry, "get")
        path = entry.get("class_path") if has_keys else entry
        if isinstance(path, str) and _is_checkpoint(path):
            written: Any = entry.get("init_args") if has_keys else None
            arguments = written if hasattr(written, "get") else {}
            dirpath, depth = arguments.get("dirpath"), str(arguments.get("filename") or "").count("/")
            if not dirpath:
                yield None, depth
            elif isinstance(dirpath, str | Path) and "://" not in str(dirpath):
                yield Path(dirpath).expanduser(), depth


def _locate(dirpath: Path, former_root: Path, root: Path) -> Path:
    """Return the present path of a run's ``dirpath``, since the run may have been moved or copied.

    Args:
        dirpath: the path in the saved configuration; if relative, it starts at the folder in which the run was started.
        former_root: the run's folder at that time.
        root: the run's folder now, which differs if it was copied, or is named from another working directory.
    """
    inside, former = (Path(os.path.abspath(path)) for path in (dirpath, former_root))
    if inside.is_relative_to(former):
        return root / inside.relative_to(former)
    # A run's folder is usually below the folder in which the run was started.
    folders = [above / dirpath for above in (root.resolve(), *root.resolve().parents)]
    return next((folder for folder in folders if folder.is_dir()), dirpath)


def _is_checkpoint(path: str) -> bool:
    module, _, name = path.rpartition(".")
    if not module:
        return name == ModelCheckpoint.__name__
    try:
        kind = resolve_name(f"{module}:{name}")
    except Exception:  # the class of an earlier run may be gone, or fail to import now
        log.debug("%s cannot be imported: checkpoints of that class are not searched", path, exc_info=True)
        return False
    return isinstance(kind, type) and issubclass(kind, ModelCheckpoint)
