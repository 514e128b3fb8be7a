"""The folder that a run leaves behind."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlightning.errors import ConfigError


def run_dir(trainer: Any) -> Path:
    """The run's folder: ``trainer.default_root_dir``.

    Args:
        trainer: a Lightning ``Trainer``, or any object with a ``default_root_dir``.
    """
    folder = getattr(trainer, "default_root_dir", None)
    if folder is None:
        raise ConfigError(
            f"{type(trainer).__name__} has no default_root_dir, so no run folder. Set one, or give the callback a path."
        )
    if "://" in str(folder):
        raise ConfigError(f"default_root_dir='{folder}' is not a local folder. Use one; copy it afterwards.")
    return Path(folder)


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Give a name beside ``path`` to write to; it becomes ``path`` when the block ends well.

    Who reads ``path`` meanwhile sees the old file or the new one, never half of one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
