"""Which checkpoints a run's folder holds, and which of them ``--ckpt_path last`` is."""

import contextlib
import logging
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from lightning.pytorch.callbacks import ModelCheckpoint

from rlightning.atomic_save import find_saved
from rlightning.distributed.checkpoint_io import SavedState, latest_checkpoint, list_checkpoints
from rlightning.errors import ConfigError

log = logging.getLogger(__name__)

FOLDER = "checkpoints"
"""In a run's folder, where checkpoints go unless a ``ModelCheckpoint`` has a ``dirpath``."""
FOLDER_DEPTH = 4
"""How far below it to search, whatever the configurations say: all of it is the run's."""


class Place(NamedTuple):
    """A folder that a ``ModelCheckpoint`` writes to.

    Attributes:
        folder: its ``dirpath``.
        depth: of folders below it: metric names in ``filename`` may have slashes.
    """

    folder: Path
    depth: int


def find_places(root: Path, callbacks: Any) -> list[Place]:
    """Where the run in ``root`` has written checkpoints by its saved configurations, and would by this one.

    Args:
        root: the run's folder.
        callbacks: ``trainer.callbacks`` of the configuration: class paths with their arguments.
    """
    listed = [callbacks]
    for file in sorted(root.glob("config*.yaml")):
        with contextlib.suppress(yaml.YAMLError, OSError, AttributeError):  # a file of the user's with such a name
            listed.append(yaml.safe_load(file.read_text(encoding="utf-8"))["trainer"]["callbacks"])
    depths: dict[Path, int] = {root / FOLDER: FOLDER_DEPTH}
    for arguments in (found for entries in listed for found in _checkpoint_arguments(entries)):
        folder = Path(arguments.get("dirpath") or root / FOLDER).expanduser()
        if "://" not in str(arguments.get("dirpath")):
            depth = str(arguments.get("filename") or "").count("/")
            depths[folder] = max(depth, depths.get(folder, 0))
    return [Place(folder, depth) for folder, depth in depths.items()]


def check_checkpoints(command: str, root: Path, places: Iterable[Place], ckpt_path: str | None) -> None:
    """Reject a checkpoint that is not there, and a new run where another has saved."""
    places = list(places)
    if ckpt_path is None:
        saved = _list(places) if command == "fit" else []
        if saved:
            key = "trainer.default_root_dir" if root in saved[0].parents else "dirpath of ModelCheckpoint"
            holder = root if root in saved[0].parents else saved[0].parent
            raise ConfigError(
                f"{key}={holder} holds a run's checkpoints already, such as {saved[0].name}. Continue that run with "
                f"--ckpt_path last, or set another {key}."
            )
    elif ckpt_path == "best":
        saved = _list(places)
        raise ConfigError(
            "ckpt_path=best: which one that is only the run itself knew. "
            + (f"Name one, such as {saved[0]}." if saved else "Name one by its path.")
        )
    elif ckpt_path not in ("last", "hpc") and "://" not in ckpt_path and not find_saved(Path(ckpt_path)).exists():
        raise ConfigError(f"ckpt_path={ckpt_path}: there is no such file. Paths count from the current folder.")


def find_last(command: str, places: Iterable[Place]) -> SavedState:
    """The checkpoint of the highest step, wherever the run has saved.

    Args:
        command: ``fit`` needs one with the optimizer's state.
        places: of :func:`find_places`.
    """
    places = list(places)
    saved = _list(places)
    latest = latest_checkpoint(saved, to_resume=command == "fit")
    if latest is not None:
        return latest
    searched = " or ".join(str(place.folder) for place in places)
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


def _list(places: Iterable[Place]) -> list[Path]:
    return [path for place in places for path in list_checkpoints(place.folder, place.depth)]


def _checkpoint_arguments(callbacks: Any) -> list[Mapping[str, Any]]:
    """The ``init_args`` of each ``ModelCheckpoint`` among configured callbacks."""
    found: list[Mapping[str, Any]] = []
    for entry in callbacks if isinstance(callbacks, list) else [callbacks]:
        path = entry.get("class_path") if hasattr(entry, "get") else entry
        if isinstance(path, str) and _is_checkpoint(path):
            arguments = entry.get("init_args") if hasattr(entry, "get") else None
            found.append(dict(arguments or {}))
    return found


def _is_checkpoint(path: str) -> bool:
    module, _, name = path.rpartition(".")
    if not module:
        return name == ModelCheckpoint.__name__
    try:
        kind = getattr(import_module(module), name)
    except (ImportError, AttributeError):  # of an earlier run, whose class is not there any more
        return False
    return isinstance(kind, type) and issubclass(kind, ModelCheckpoint)
