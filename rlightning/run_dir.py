"""The folder that a run leaves behind."""

import os
import time
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from rlightning.errors import ConfigError
from rlightning.hooks import RLCallback
from rlightning.parallel.execution_mode import ExecutionMode, execution_mode
from rlightning.run_lock import lock_run, unlock_run

_locked: set[Path] = set()
"""Folders that no command line has taken, but a fit."""

SAVED = "*.ckpt"
"""What ``ModelCheckpoint`` writes in its folder."""

FOLDERS_VARIABLE = "RLIGHTNING_RUN_FOLDERS"
"""What rank 0 has chosen, in order, for the ranks that Lightning starts by running the same program again."""

_chosen: list[str] = []
"""Of this process."""


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


def lock_run_of(trainer: Any) -> None:
    """Take the folder of a fit in which a callback writes, where the command line has not; on every rank.

    Raises:
        ConfigError: another run is at work there, or nothing can be written there.
    """
    is_other = execution_mode() is ExecutionMode.WORKER or not trainer.is_global_zero
    if is_other or "://" in str(trainer.default_root_dir):
        return
    folder = run_dir(trainer).absolute()
    outputs = [c.output(trainer, "fit") for c in trainer.callbacks if isinstance(c, RLCallback)]
    if not trainer.fast_dev_run:  # which saves nothing
        saving = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
        outputs += [Path(c.dirpath or folder).expanduser() / SAVED for c in saving if c.save_top_k != 0 or c.save_last]
    if any(folder in output.absolute().parents for output in outputs if output is not None) and lock_run(folder):
        _locked.add(folder)


class UnlockRun(Callback):
    """Undoes :func:`lock_run_of` when the fit is over."""

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Called when the run was cut short."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Called when the run is over."""
        folder = Path(trainer.default_root_dir).expanduser().absolute()
        if folder in _locked:
            _locked.discard(folder)
            unlock_run(folder)


def new_run_folder() -> str:
    """Choose ``runs/<date>-<time>`` below the current folder, one that is not there yet; in other ranks, rank 0's."""
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
    """What rank 0 chose for as many Trainers as this process has made, before it started this process."""
    folders = os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep)
    number = len(_chosen)
    if number >= len(folders) or not folders[number]:
        raise ConfigError(
            "default_root_dir is not set for a Trainer that is made after another one has started further ranks: each "
            "rank would choose a folder of its own. Set it, such as default_root_dir='runs/first'."
        )
    _chosen.append(folders[number])
    return folders[number]
