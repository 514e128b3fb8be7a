"""SIGTERM and Ctrl-C end a fit on all ranks after the same batch, with its state saved."""

import logging
import signal
import threading
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from rlightning.parallel.execution_mode import ExecutionMode, execution_mode, is_controller
from rlightning.parallel.stop_signal import GRACE_PERIOD, StopSignal, is_interactive, stop_signal

log = logging.getLogger(__name__)


class EndOnSigterm(Callback):
    """Has SIGTERM and Ctrl-C end a fit within a grace period, after ``ModelCheckpoint`` has saved its state.

    A prediction, a validation and a test end at SIGTERM before their next batch. The process ends with 143, or with 130
    after Ctrl-C. At Python's prompt and in notebooks Ctrl-C is what it always is there, an exception at once.

    Args:
        grace_period: seconds between the first signal and the end. A step that still samples after half of them is
            left, and the state after the step before is saved: leave time for that.
    """

    def __init__(self, grace_period: float = GRACE_PERIOD) -> None:
        super().__init__()
        self.grace_period = grace_period
        self._stop: StopSignal | None = None
        self._usual_handler: Any = None

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Have SIGTERM noted, and nothing else done in its handler; become the last of the callbacks."""
        self._stop = stop_signal(trainer)
        self._stop.grace_period = self.grace_period
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        # A new list: Lightning is going through this one. The others save and clean up before this one is through.
        trainer.callbacks = [*(c for c in callbacks if c is not self), self]  # type: ignore[attr-defined]
        if stage == "fit" and execution_mode() is not ExecutionMode.WORKER:
            self._stop.watch()

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Have Ctrl-C noted too: before, there is nothing to save."""
        self._allow_cut()
        is_main = threading.current_thread() is threading.main_thread()
        is_usual = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if is_usual and not is_interactive():
            assert self._stop is not None
            self._usual_handler = signal.signal(signal.SIGINT, self._stop.note)

    # What a checkpoint holds changes between a step's update and its end. This is the last of the callbacks.

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Called before anything of a step has happened."""
        self._allow_cut()

    def on_rollout_start(self, trainer: Any, module: Any, prompts: Any) -> None:
        """Called before a rollout, of which a step may have several."""
        self._allow_cut()

    def on_update_start(self, trainer: Any, module: Any, batch: Any) -> None:
        """Called before an update, also of steps that have no rollout."""
        self._keep_step()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Called before an update of a module without hooks of its own."""
        self._keep_step()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called when the step is over and saved."""
        self._go_on()

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Called before anything of a validation has happened."""
        self._allow_cut()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Called before a checkpoint of what was validated is saved."""
        self._keep_step()

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Called when what was validated has been saved."""
        self._go_on()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Called before ``ModelCheckpoint`` saves; what follows is the next step, or the end."""
        self._keep_step()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Called before any other checkpoint is written."""
        self._keep_step()

    def _go_on(self) -> None:
        """After a signal the run ends here, or after a validation, and saves its state."""
        if self._stop is not None and not self._stop.signum:
            self._allow_cut()

    def _allow_cut(self) -> None:
        # A controller's workers would go on with a step that it has left.
        if self._stop is not None and not is_controller():
            self._stop.can_be_cut = True

    def _keep_step(self) -> None:
        if self._stop is not None:
            self._stop.keep_step()

    # The end

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """Give Lightning's exception its exit code; called when all other callbacks have saved and cleaned up."""
        if isinstance(exception, SIGTERMException) and self._stop is not None:
            exception.code = self._stop.exit_code
        is_asked = isinstance(exception, SIGTERMException | KeyboardInterrupt)
        if is_asked and trainer.state.fn == "fit" and trainer.is_global_zero:
            self._tell_how_to_go_on(trainer)
        self._close()

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Called when the run is over."""
        self._close()

    def on_predict_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Stop before the next batch."""
        if trainer.received_sigterm:
            raise SIGTERMException

    def _tell_how_to_go_on(self, trainer: Trainer) -> None:
        assert self._stop is not None
        saved: list[Any] = [c for c in trainer.checkpoint_callbacks if getattr(c, "_last_checkpoint_saved", "")]
        if not saved:
            log.warning("No checkpoint was saved: no step was over, or no ModelCheckpoint may save one.")
            return
        newest = max(saved, key=lambda callback: callback._last_global_step_saved)
        path = newest._last_checkpoint_saved
        command = self._stop.command or f"trainer.fit(..., ckpt_path={path!r})"
        log.info("The state after step %d is saved. Go on with:\n  %s", newest._last_global_step_saved, command)

    def _close(self) -> None:
        if self._usual_handler is not None:
            signal.signal(signal.SIGINT, self._usual_handler)
            self._usual_handler = None
        if self._stop is not None:
            self._stop.close()
