"""Which checkpoints a run's folder holds, and which of them ``--ckpt_path last`` is."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch.callbacks import ModelCheckpoint

from rlightning.atomic_save import find_saved
from rlightning.config_files import read_yaml
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
    depths: dict[Path, int] = {root / FOLDER: FOLDER_DEPTH}
    for arguments in (found for entries in [callbacks, *_saved_callbacks(root)] for found in _find_arguments(entries)):
        dirpath, filename = arguments.get("dirpath") or root / FOLDER, arguments.get("filename")
        if isinstance(dirpath, str | Path) and "://" not in str(dirpath):
            folder = Path(dirpath).expanduser()
            depths[folder] = max(str(filename or "").count("/"), depths.get(folder, 0))
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


def _saved_callbacks(root: Path) -> Iterator[Any]:
    """``trainer.callbacks`` of each configuration that the run's folder keeps."""
    for file in sorted(root.glob("config*.yaml")):
        try:
            content = read_yaml(str(file))
        except ConfigError:  # a file of the user's with such a name, as are those without the keys
            continue
        trainer = content.get("trainer") if isinstance(content, Mapping) else None
        yield trainer.get("callbacks") if isinstance(trainer, Mapping) else None


def _find_arguments(callbacks: Any) -> Iterator[Mapping[str, Any]]:
    """The ``init_args`` of each ``ModelCheckpoint`` among configured callbacks."""
    for entry in callbacks if isinstance(callbacks, list) else [callbacks]:
        has_keys = hasattr(entry, "get")
        path = entry.get("class_path") if has_keys else entry
        if isinstance(path, str) and _is_checkpoint(path):
            arguments = entry.get("init_args") if has_keys else None
            yield arguments if hasattr(arguments, "get") else {}


def _is_checkpoint(path: str) -> bool:
    module, _, name = path.rpartition(".")
    if not module:
        return name == ModelCheckpoint.__name__
    try:
        kind = getattr(import_module(module), name)
    except Exception:  # of an earlier run: the module may be gone, or a user's that fails now
        log.debug("%s cannot be imported: checkpoints of that class are not searched", path, exc_info=True)
        return False
    return isinstance(kind, type) and issubclass(kind, ModelCheckpoint)
