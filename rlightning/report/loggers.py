"""Lightning's loggers, changed so that a full disk does not end the run, and no logger starts before the checks.

:func:`adapt_loggers` changes the class of logger objects to classes of this module. Data that cannot be written is
skipped with a warning; the metrics of ``CSVLogger`` stay in memory until they can be written.
"""

import csv
import io
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_only

from rlightning.atomic_save import written_aside
from rlightning.disk import BestEffort
from rlightning.protocols import callbacks_of

ROOM_BYTES = 1 << 18
"""Free bytes that a folder needs before TensorBoard writes to it: more than the metrics of a step."""


def adapt_loggers(loggers: Iterable[Logger]) -> None:
    """Make each logger, in place, an object of a subclass that logs disk errors instead of raising them.

    Methods that the logger's own class overrides still run.
    """
    for logger in loggers:
        if isinstance(logger, _Tolerant):
            continue
        kind = type(logger)
        own = next((own for base, own in _OWN.items() if isinstance(logger, base)), _Tolerant)
        # A local class: otherwise jsonargparse, which looks up bare names such as CSVLogger, would find two.
        names = {"__qualname__": f"adapt_loggers.<locals>.{kind.__name__}", "__doc__": kind.__doc__}
        adapted: Any = type(kind.__name__, (own, kind), names)
        logger.__class__ = adapted


class _Tolerant(Logger):
    """Mixin before a logger's class: disk errors are logged once instead of raised."""

    _effort: BestEffort | None = None

    @property
    def effort(self) -> BestEffort:
        """The :class:`~rlightning.disk.BestEffort` that catches this logger's disk errors and logs the first."""
        if self._effort is None:
            self._effort = BestEffort(f"Metrics of {type(self).__name__}")
        return self._effort

    def log_metrics(self, metrics: Mapping[str, object], step: int | None = None) -> None:
        """Log metrics; a disk error is logged instead of raised."""
        self._attempt(super().log_metrics, metrics, step)  # type: ignore[safe-super]  # of the class it is mixed into

    def log_hyperparams(self, *args: object, **kwargs: object) -> None:
        """Log hyperparameters; a disk error is logged instead of raised."""
        self._attempt(super().log_hyperparams, *args, **kwargs)  # type: ignore[safe-super]

    def log_graph(self, *args: object, **kwargs: object) -> None:
        """Log the model's graph; a disk error is logged instead of raised."""
        self._attempt(super().log_graph, *args, **kwargs)

    def after_save_checkpoint(self, checkpoint_callback: object) -> None:
        """Log a checkpoint; a disk error is logged instead of raised."""
        self._attempt(super().after_save_checkpoint, checkpoint_callback)

    def save(self) -> None:
        """Write the logged data; called after each step's metrics. A disk error is logged instead of raised."""
        self._attempt(super().save)
        self.effort.settle()

    def finalize(self, status: str) -> None:
        """Close the logger at the end of the run; a disk error is logged instead of raised."""
        self._attempt(super().finalize, status)

    def _attempt(self, write: Callable[..., object], *args: object, **kwargs: object) -> None:
        with self.effort.attempt():
            write(*args, **kwargs)


class _TolerantCSV(_Tolerant, CSVLogger):
    """A ``CSVLogger`` whose file is complete after each write."""

    @property
    def experiment(self) -> ExperimentWriter:
        """The logger's file writer."""
        writer: ExperimentWriter = super().experiment
        if type(writer) is ExperimentWriter and "://" not in writer.log_dir:
            writer.__class__ = MetricsFile
        return writer


class _TolerantTensorBoard(_Tolerant, TensorBoardLogger):
    """A ``TensorBoardLogger`` that checks disk space first, since its writer cannot be used after a failed write."""

    _has_room = False

    @property
    def experiment(self) -> Any:
        """The SummaryWriter, or an object that ignores all calls while the folder is not writable."""
        if self._has_room or rank_zero_only.rank != 0 or "://" in self.log_dir:  # type: ignore[attr-defined]
            return super().experiment
        with self.effort.attempt():
            self._make_room()
            self._has_room = True
            return super().experiment
        self._drop_files()
        return _NullWriter()

    def save(self) -> None:
        """Write the logged data; the next use of :attr:`experiment` checks the free disk space again."""
        super().save()
        self._has_room = False

    def _make_room(self) -> None:
        """Create the folder if it is missing; raise an OSError if it has no space for a file."""
        if not os.path.isdir(self.log_dir):
            self._drop_files()  # a file without a path discards what is written
            os.makedirs(self.log_dir)
        with tempfile.TemporaryFile(dir=self.log_dir) as file:
            file.write(bytes(ROOM_BYTES))

    def _drop_files(self) -> None:
        """Detach the SummaryWriter from its file, so that it opens a new one."""
        if self._experiment is not None:
            self._experiment.file_writer = self._experiment.all_writers = None


class _NullWriter:
    """An object that has every method; each does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


_OWN: dict[type[Logger], type[_Tolerant]] = {CSVLogger: _TolerantCSV, TensorBoardLogger: _TolerantTensorBoard}


class MetricsFile(ExperimentWriter):
    """The writer of a ``CSVLogger``'s ``metrics.csv``, which loses no metrics on a full disk.

    A failed write leaves the file unchanged, and the next write includes its metrics.
    """

    def save(self) -> None:
        """Append the metrics since the last call; the file is rewritten if there is a new column."""
        if not self.metrics:
            return
        path = Path(self.metrics_file_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        header = _read_header(path)
        self.metrics_keys = sorted({*self.metrics_keys, *header}.union(*self.metrics))
        if header == self.metrics_keys:
            _append(path, self._to_csv(self.metrics))
        else:
            names = dict(zip(self.metrics_keys, self.metrics_keys, strict=True))
            with written_aside(path) as aside:
                text = self._to_csv([names, *_read_rows(path), *self.metrics])
                aside.write_text(text, encoding="utf-8", newline="")
        self.metrics = []

    def _to_csv(self, rows: Sequence[Mapping[str, object]]) -> str:
        text = io.StringIO(newline="")
        csv.DictWriter(text, self.metrics_keys).writerows(rows)
        return text.getvalue()


def _read_header(path: Path) -> list[str]:
    """Return the columns of a CSV file; an empty list if there is none."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return next(csv.reader(file), [])


def _read_rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _append(path: Path, text: str) -> None:
    """Append a text to a file; if that fails, restore the file."""
    size = path.stat().st_size
    try:
        with path.open("a", encoding="utf-8", newline="") as file:
            file.write(text)
    except OSError:
        with suppress(OSError):
            os.truncate(path, size)
        raise


class LateLoggers(Callback):
    """The first callback, whose ``setup`` gives the Trainer the loggers that :func:`delay_loggers` hid from it.

    Lightning has every logger start its run before the first ``setup``, and again after all of them. A
    ``ModelCheckpoint`` without a folder uses the logger's run, which then must exist earlier.
    """

    def __init__(self, loggers: list[Logger]) -> None:
        self.loggers = loggers

    def setup(self, trainer: Trainer, pl_module: object, stage: str) -> None:
        """Restore the Trainer's loggers; called when the data have been read."""
        trainer.loggers = self.loggers
        if any(isinstance(one, ModelCheckpoint) and one.dirpath is None for one in callbacks_of(trainer)):
            for logger in self.loggers:
                hasattr(logger, "experiment")  # reads the property, which starts its run; not every logger has it

    def on_exception(self, trainer: Trainer, pl_module: object, exception: BaseException) -> None:
        """Restore the Trainer's loggers, in case the error occurred before :meth:`setup`."""
        trainer.loggers = self.loggers


def delay_loggers(trainer: Trainer) -> None:
    """Hide the Trainer's loggers until the first callback's ``setup``, so that no logger starts its run before that."""
    others = [callback for callback in callbacks_of(trainer) if not isinstance(callback, LateLoggers)]
    trainer.callbacks = [LateLoggers(trainer.loggers), *others]  # type: ignore[attr-defined]
    trainer.loggers = []


def is_service(logger: object) -> bool:
    """Return whether a logger writes elsewhere than to the run's folder, such as to a web service."""
    return not isinstance(logger, (CSVLogger, TensorBoardLogger))
