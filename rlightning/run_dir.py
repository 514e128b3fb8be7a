"""The folder to which a run writes."""

import os
import time
from pathlib import Path

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from rlightning.errors import ConfigError
from rlightning.protocols import HasFolder, has

FOLDERS_VARIABLE = "RLIGHTNING_RUN_FOLDERS"
"""Environment variable with rank 0's run folders, in order, for ranks that Lightning starts with the same program."""

_chosen: list[str] = []
"""Run folders that this process has used, in order."""


def run_dir(trainer: object) -> Path:
    """Return the run's folder: ``trainer.default_root_dir``.

    Args:
        trainer: a Lightning ``Trainer``, or any object with a ``default_root_dir``.
    """
    folder = trainer.default_root_dir if has(trainer, HasFolder) else None
    if folder is None:
        raise ConfigError(
            f"{type(trainer).__name__} has no default_root_dir, so no run folder. Set one, or give the callback a path."
        )
    if "://" in str(folder):
        raise ConfigError(f"default_root_dir='{folder}' is not a local folder. Use one; copy it afterwards.")
    return Path(folder).expanduser()


def new_run_folder() -> str:
    """Return a new folder ``runs/<date>-<time>`` in the working directory; on other ranks, the folder of rank 0."""
    launched = [env for env in (TorchElasticEnvironment, SLURMEnvironment) if env.detect() and env().world_size() > 1]
    if launched:
        raise ConfigError(
            "trainer.default_root_dir is not set, and several processes were launched from outside: each would choose "
            "a folder of its own. Set it, such as --trainer.default_root_dir runs/first."
        )
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return _folder_of_rank_0()
    stamped = Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    path, number = stamped, 1
    while path.exists() or str(path) in _chosen:
        number += 1
        path = stamped.with_name(f"{stamped.name}_{number}")
    _chosen.append(str(path))
    os.environ[FOLDERS_VARIABLE] = os.pathsep.join(_chosen)
    return str(path)


def _folder_of_rank_0() -> str:
    """Return the folder that rank 0 chose for this process's n-th Trainer, which an environment variable passes on."""
    folders = os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep)
    number = len(_chosen)
    if number >= len(folders) or not folders[number]:
        raise ConfigError(
            "default_root_dir is not set for a Trainer that is made after another one has started further ranks: each "
            "rank would choose a folder of its own. Set it, such as default_root_dir='runs/first'."
        )
    _chosen.append(folders[number])
    return folders[number]
