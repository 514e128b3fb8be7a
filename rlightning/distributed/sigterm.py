"""SIGTERM ends a fit on all ranks after the same batch, without a collective in the signal handler."""

from functools import partial
from types import FrameType
from typing import Any, NoReturn

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from rlightning.distributed.collectives import any_rank
from rlightning.distributed.failure import TERMINATED


class EndOnSigterm(Callback):
    """Has SIGTERM end the process with 143, in place of Lightning's 0, and a prediction too, which Lightning ends not.

    Lightning stops a fit between two steps; then ``ModelCheckpoint`` saves.
    """

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Have the signal noted, and nothing else done in its handler, on whatever strategy."""
        connector = trainer._signal_connector
        if "_sigterm_notifier_fn" not in vars(connector):  # else SigtermAgreement's is there
            connector._sigterm_notifier_fn = partial(record_sigterm, trainer)  # type: ignore[method-assign]

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """Give Lightning's exception its exit code."""
        if isinstance(exception, SIGTERMException):
            exception.code = TERMINATED

    def on_predict_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Stop before the next batch."""
        if trainer.received_sigterm:
            raise SIGTERMException


def record_sigterm(trainer: Trainer, signum: int, frame: FrameType | None) -> None:
    """Handle SIGTERM in a process that is alone: pass it on to processes that it has started, and stop soon.

    Lightning's handler logs. If the signal comes while a line is written, that raises from within the handler, in the
    middle of the writing, and the signal is lost.
    """
    if not trainer.received_sigterm and trainer.strategy.launcher is not None:
        trainer.strategy.launcher.kill(signum)
    trainer._signal_connector.received_sigterm = True


class SigtermAgreement:
    """Takes the place of two methods of the Trainer's.

    Lightning's handler broadcasts a tensor of the device from inside the signal handler, in the middle of whatever
    collective the process is in; and asks with another one before each batch. This one's handler only takes a note.

    Args:
        trainer: one whose ``fit`` is about to begin.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._is_asked = False
        trainer._signal_connector._sigterm_notifier_fn = self.note  # type: ignore[method-assign, assignment]
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = self.agree  # type: ignore[method-assign]

    def note(self, signum: int, frame: FrameType | None) -> None:
        """The signal handler."""
        connector, launcher = self._trainer._signal_connector, self._trainer.strategy.launcher
        if not self._is_asked and launcher is not None:
            launcher.kill(signum)
        self._is_asked = True
        if self._trainer.world_size == 1 or not self._trainer.training:
            connector.received_sigterm = True

    def agree(self) -> None:
        """Before a batch: stop if any rank was asked to."""
        if any_rank(self._is_asked, name="next batch"):
            self._stop()

    def _stop(self) -> NoReturn:
        self._trainer._signal_connector.received_sigterm = True
        raise SIGTERMException
