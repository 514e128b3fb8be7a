"""Loggers make their runs and folders once nothing of the configuration can be refused any more."""

from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger


class LateLoggers(Callback):
    """Stands in front of the callbacks and gives the Trainer its loggers back, whom it was to ask for their runs.

    Lightning has every logger make its run before the first ``setup``. After that it asks again when the set-up is
    over. A ``ModelCheckpoint`` without a folder names one by the logger's run, which then has to be there earlier.

    Args:
        loggers: all of the Trainer's.
    """

    def __init__(self, loggers: list[Logger]) -> None:
        self.loggers = loggers

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Called when the data have been read."""
        trainer.loggers = self.loggers
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if any(isinstance(callback, ModelCheckpoint) and callback.dirpath is None for callback in callbacks):
            for logger in self.loggers:
                getattr(logger, "experiment", None)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """Called in the middle of a set-up too."""
        trainer.loggers = self.loggers


def delay_loggers(trainer: Any) -> None:
    """Hide the loggers from the Trainer until the first callback's ``setup``."""
    others = [callback for callback in trainer.callbacks if not isinstance(callback, LateLoggers)]
    trainer.callbacks = [LateLoggers(trainer.loggers), *others]
    trainer.loggers = []


def is_service(logger: Logger) -> bool:
    """Whether a logger makes a run somewhere else than in the run's folder."""
    return not isinstance(logger, (CSVLogger, TensorBoardLogger))
