"""Locks the run's folder during a fit that was started from Python; the command line locks the folder itself."""

from pathlib import Path

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from rlightning.hooks import RLCallback
from rlightning.parallel.execution_mode import ExecutionMode, execution_mode
from rlightning.protocols import callbacks_of
from rlightning.run_dir import run_dir
from rlightning.run_lock import lock_run, relock_run, unlock_run

_locked: set[Path] = set()
"""Folders that a fit has locked, rather than the command line."""

SAVED = "*.ckpt"
"""Pattern of the files that ``ModelCheckpoint`` writes."""


def lock_run_of(trainer: Trainer) -> None:
    """Lock the folder of a fit if a callback writes there and the command line has not locked it; called on every rank.

    Raises:
        ConfigError: another run uses the folder, or it is not writable.
    """
    is_other = execution_mode() is ExecutionMode.WORKER or not trainer.is_global_zero
    if is_other or "://" in str(trainer.default_root_dir):
        return
    folder = run_dir(trainer).absolute()
    outputs = [c.output(trainer, "fit") for c in callbacks_of(trainer) if isinstance(c, RLCallback)]
    if not trainer.fast_dev_run:  # type: ignore[attr-defined]  # which saves nothing
        saving = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
        outputs += [Path(c.dirpath or folder).expanduser() / SAVED for c in saving if c.save_top_k != 0 or c.save_last]
    if any(folder in output.absolute().parents for output in outputs if output is not None) and lock_run(folder):
        _locked.add(folder)


class UnlockRun(Callback):
    """A callback that unlocks the run's folder after the fit, and renews a lock that was removed during the fit."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: object, batch: object, batch_idx: int) -> None:
        """Lock the folder again if it or its lock file was removed; called when a step begins."""
        relock_run(Path(trainer.default_root_dir).expanduser())

    def on_exception(self, trainer: Trainer, pl_module: object, exception: BaseException) -> None:
        """Unlock the folder; called when an exception or an interruption has ended the run."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Trainer, pl_module: object, stage: str) -> None:
        """Unlock the folder; called when the run has ended."""
        folder = Path(trainer.default_root_dir).expanduser().absolute()
        if folder in _locked:
            _locked.discard(folder)
            unlock_run(folder)
