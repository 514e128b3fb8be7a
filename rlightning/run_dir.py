"""The folder that a run leaves behind."""

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
    return Path(folder).expanduser()
