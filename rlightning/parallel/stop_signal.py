"""Ends a fit after SIGTERM or Ctrl-C with its state saved, within a grace period.

::

    first signal               the current step is finished, the state is saved, and the process ends
    half of the grace period   a step that still samples, such as from a hanging engine, is interrupted: only its
                               completions are lost, and the state after the step before is saved
    end of the grace period    the process is killed
    second signal              the process is killed
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from rlightning import intervals
from rlightning.lightning_internals import SubprocessLauncher, last_saved, replace_signal_handling, set_received_sigterm
from rlightning.parallel.collectives import all_reduce
from rlightning.parallel.cpu_group import connection, renew_connection
from rlightning.parallel.execution_mode import ExecutionMode, execution_mode, is_controller
from rlightning.parallel.failure_watch import active_watch, end_children, exit_now
from rlightning.parallel.rank_store import StoreError

log = logging.getLogger(__name__)

GRACE_PERIOD = 120.0
"""Default grace period in seconds after a stop signal; ``model.stop_grace`` overrides it."""


class StopSignal:
    """Handles SIGTERM and Ctrl-C for a Trainer: all ranks stop after the current step, within a grace period.

    There is one for each Trainer (:func:`stop_signal`).

    Two methods of the Trainer are replaced. Inside its signal handler, Lightning broadcasts a device tensor, perhaps in
    the middle of another collective, and logs, perhaps in the middle of another line; it broadcasts again before each
    batch. This handler only sets a flag.

    Attributes:
        command: shell command that resumes the run, if the run was started from a shell.
        signum: number of the first signal, or 0.
        asked_at: time of the first signal, by ``time.monotonic()``.
        can_interrupt: whether neither an update nor the writing of a checkpoint is in progress.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.grace_period, self.command = GRACE_PERIOD, ""
        self.signum, self.can_interrupt = 0, False
        self.asked_at = 0.0
        self._trainer: Trainer = weakref.proxy(trainer)
        self._must_interrupt = False
        self._lock, self._is_decided, self._is_over = threading.RLock(), threading.Event(), threading.Event()
        self._is_decided.set()  # cleared while the ranks vote
        replace_signal_handling(trainer, handler=self.handle_signal, before_batch=self.agree)

    @property
    def exit_code(self) -> int:
        """The exit code that a shell or a scheduler expects after this signal."""
        return 128 + (self.signum or signal.SIGTERM)

    def handle_signal(self, signum: int, frame: FrameType | None) -> None:
        """Handle SIGTERM or Ctrl-C: the first one asks the run to stop after the current step, a second one kills it.

        In interactive Python a second one has no effect. A signal of this process's own thread ends the step.
        """
        if self._must_interrupt:  # sent by this process's thread, see watch()
            self._must_interrupt = False
            self._interrupt()
        elif not self.signum:
            self.asked_at, self.signum = time.monotonic(), signum  # in this order: a thread waits for the signal
            launcher = self._trainer.strategy.launcher
            if launcher is not None:
                launcher.kill(signum)
            if self._trainer.world_size == 1 or not self._trainer.training:
                set_received_sigterm(self._trainer)
        elif time.monotonic() - self.asked_at > intervals.SAME_SIGNAL_GRACE and not is_interactive():
            self._end("ended by a second signal")

    def agree(self) -> None:
        """Raise a SIGTERMException on all ranks if any has received a signal; all ranks call this before each batch."""
        asked = int(all_reduce(torch.tensor(self.signum), "max", name="next batch"))
        if asked:
            if not self.signum:  # another rank was asked to stop
                self.asked_at, self.signum = time.monotonic(), asked
            self.keep_step()  # the state is saved next
            set_received_sigterm(self._trainer)
            raise SIGTERMException

    def keep_step(self) -> None:
        """Forbid interruption of the current step from now on, since it changes state that checkpoints contain.

        If the ranks are voting on an interruption, wait for the result, which may interrupt the step here.
        """
        with self._lock:
            if self._is_decided.is_set():
                self.can_interrupt = False
                return
        self._is_decided.wait()  # an interruption arrives as a signal, here at the latest
        self.can_interrupt = False

    def watch(self) -> None:
        """Start a thread that enforces the grace period after a signal.

        After half of it a step that still samples is interrupted; at its end the process is killed.
        """
        self._is_over.clear()
        threading.Thread(target=self._watch, name="stop-signal", daemon=True).start()

    def close(self) -> None:
        """Stop the thread and reset the state, because the run has ended."""
        self._is_over.set()
        self.signum, self.can_interrupt = 0, False

    def _watch(self) -> None:
        while not self.signum:
            if self._is_over.wait(intervals.POLL_INTERVAL):
                return
        if self._trainer.is_global_zero:
            log.warning(
                "%s: the run ends after the step under way, at most %g s from now, with its state saved. A second one "
                "ends it at once.", signal.Signals(self.signum).name, self.grace_period,
            )  # fmt: skip
        has_tried = False
        while (left := self._remaining()) > 0:
            if left < self.grace_period / 2 and self.can_interrupt and not has_tried:
                has_tried = connection() is not None
                self._try_interrupt()
            if self._is_over.wait(min(intervals.POLL_INTERVAL, left)):
                return
        if not is_interactive():
            self._end(f"ended, since the step under way was not over {self.grace_period:g} s after the signal")

    def _remaining(self) -> float:
        """Return the remaining seconds of the grace period."""
        return max(0.0, self.asked_at + self.grace_period - time.monotonic())

    def _try_interrupt(self) -> None:
        """Interrupt the main thread if all ranks are sampling."""
        with self._lock:
            if self._must_interrupt:  # the previous signal has not been delivered yet
                return
            can_interrupt = self.can_interrupt
            if can_interrupt:
                self._is_decided.clear()
        must_interrupt = False
        try:
            must_interrupt = self._vote(can_interrupt)
        finally:
            if not must_interrupt:
                self._is_decided.set()
        if must_interrupt:  # the main thread is suspended until the signal is delivered
            self._must_interrupt = True
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, self.signum)

    def _vote(self, can_interrupt: bool) -> bool:
        """Return whether all ranks can be interrupted; a rank in its update would wait for the interrupted ranks."""
        shared = connection()
        if shared is None:
            return can_interrupt
        seconds = min(intervals.INTERRUPT_VOTE_TIMEOUT, self._remaining() / 2)
        try:
            votes = shared.store.exchange("can_interrupt", str(can_interrupt), seconds)
            is_unanimous = [*votes.values()] == ["True"] * len(shared.store.ranks)
            return shared.store.set_first("must_interrupt", str(is_unanimous)) == "True"
        except StoreError:
            return False

    def _interrupt(self) -> None:
        """Raise SIGTERMException in the main thread, which ends the step and any collective in it."""
        self._is_decided.set()
        if not self.can_interrupt:
            return
        self.can_interrupt = False
        if connection() is not None:
            renew_connection()
            watch = active_watch()
            if watch is not None:
                watch.keeps_groups = True
            # Threads of the abandoned connection may wait for other ranks until those have ended.
            Finalize(None, exit_now, args=(self.exit_code,), exitpriority=-99)
        raise SIGTERMException

    def _end(self, reason: str) -> None:
        """Kill this process and the ranks that it has started."""
        with contextlib.suppress(OSError):
            os.write(2, f"{reason}\n".encode())
        watch = active_watch()
        if watch is not None:
            watch.tell_end(self.exit_code)
        launcher = self._trainer.strategy.launcher
        if isinstance(launcher, SubprocessLauncher):
            end_children(launcher.procs, 0)
        os._exit(self.exit_code)


_signals: weakref.WeakKeyDictionary[Trainer, StopSignal] = weakref.WeakKeyDictionary()


def stop_signal(trainer: Trainer) -> StopSignal:
    """Return the :class:`StopSignal` of a Trainer; the first call creates it in place of Lightning's handling."""
    if trainer not in _signals:
        _signals[trainer] = StopSignal(trainer)
    return _signals[trainer]


def is_interactive() -> bool:
    """Return whether the process outlives the run: ``sys.ps1`` is set by Python's prompt, IPython and notebooks."""
    return hasattr(sys, "ps1")


class EndOnSigterm(Callback):
    """A callback that ends a fit within a grace period after SIGTERM or Ctrl-C, after ``ModelCheckpoint`` has saved.

    A prediction, a validation and a test end at SIGTERM before their next batch. The exit code is 143, or 130 after
    Ctrl-C. At Python's prompt and in notebooks Ctrl-C immediately raises KeyboardInterrupt, as usual.

    Args:
        grace_period: maximum seconds from the first signal to the end of the process. A step that still samples after
            half of this time is interrupted; the second half must suffice for saving the state.
    """

    def __init__(self, grace_period: float = GRACE_PERIOD) -> None:
        super().__init__()
        self.grace_period = grace_period
        self._stop: StopSignal | None = None
        self._usual_handler: signal.Handlers | Callable[[int, FrameType | None], Any] | int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepare the handling of SIGTERM, and move this callback to the end of the list."""
        self._stop = stop_signal(trainer)
        self._stop.grace_period = self.grace_period
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        # A new list, since Lightning is iterating over this one. The other callbacks save and clean up before this one.
        trainer.callbacks = [*(c for c in callbacks if c is not self), self]  # type: ignore[attr-defined]
        if stage == "fit" and execution_mode() is not ExecutionMode.WORKER:
            self._stop.watch()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Handle Ctrl-C like SIGTERM from now on, except in notebooks: before training there is nothing to save."""
        self._allow_interrupt()
        is_main = threading.current_thread() is threading.main_thread()
        is_usual = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if is_usual and not is_interactive():
            assert self._stop is not None
            self._usual_handler = signal.signal(signal.SIGINT, self._stop.handle_signal)

    def _allow_interrupt(self, *_: object, **__: object) -> None:
        """Allow interruption; called when a step, a rollout or a validation starts."""
        # A controller's workers would continue with a step that the controller has left.
        if self._stop is not None and not is_controller():
            self._stop.can_interrupt = True

    def _keep_step(self, *_: object, **__: object) -> None:
        """Forbid interruption; called before an update, with or without RL hooks, and before a checkpoint is saved."""
        if self._stop is not None:
            self._stop.keep_step()

    def _allow_interrupt_if_running(self, *_: object, **__: object) -> None:
        """Allow interruption again unless a signal has arrived; called after a step or validation has been saved."""
        if self._stop is not None and not self._stop.signum:
            self._allow_interrupt()

    # The state of a checkpoint changes between a step's update and its end. This is the last callback.
    on_train_batch_start = on_rollout_start = on_validation_start = _allow_interrupt
    on_update_start = on_before_optimizer_step = on_save_checkpoint = _keep_step
    on_validation_epoch_end = on_train_epoch_end = _keep_step
    on_train_batch_end = on_validation_end = _allow_interrupt_if_running

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Set the exit code of a SIGTERMException, log how to resume, and restore signal handlers; called last."""
        if isinstance(exception, SIGTERMException) and self._stop is not None:
            exception.code = self._stop.exit_code
        is_asked = isinstance(exception, SIGTERMException | KeyboardInterrupt)
        if is_asked and trainer.state.fn == "fit" and trainer.is_global_zero:
            self._log_resume_command(trainer)
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the signal handlers; called when the run is over."""
        self._close()

    def on_predict_batch_end(self, trainer: Trainer, pl_module: object, *args: object, **kwargs: object) -> None:
        """Stop a prediction before its next batch if a signal has arrived."""
        if trainer.received_sigterm:
            raise SIGTERMException

    def _log_resume_command(self, trainer: Trainer) -> None:
        assert self._stop is not None
        step, path = last_saved(trainer)
        if not path:
            log.warning("No checkpoint was saved: no step was over, or no ModelCheckpoint may save one.")
            return
        command = self._stop.command or f"trainer.fit(..., ckpt_path={path!r})"
        log.info("The state after step %d is saved. Go on with:\n  %s", step, command)

    def _close(self) -> None:
        if self._usual_handler is not None:
            signal.signal(signal.SIGINT, self._usual_handler)
            self._usual_handler = None
        if self._stop is not None:
            self._stop.close()
