"""What a process does at a signal to stop: SIGTERM and Ctrl-C end a fit with its state saved, within a grace period.

What comes when::

    first signal               the step under way is finished, its state is saved, and the process ends
    half of the grace period   a step that still samples, such as from an engine that hangs, is left: nothing of it is
                               lost but its completions, and the state after the step before is saved
    end of the grace period    the process ends, whatever it does
    second signal              the process ends at once
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
import weakref
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from rlightning import intervals
from rlightning.parallel.collectives import all_reduce
from rlightning.parallel.cpu_group import StoreError, connection, renew_connection
from rlightning.parallel.failure import active_watch, exit_now

log = logging.getLogger(__name__)

GRACE_PERIOD = 120.0
"""Seconds, unless ``model.stop_grace`` sets them."""


class StopSignal:
    """What a process knows of a signal that asks its run to stop; one a Trainer (:func:`stop_signal`).

    It takes the place of two methods of the Trainer's. Lightning's handler broadcasts a tensor of the device from
    inside the signal handler, in the middle of whatever collective the process is in, and logs, which raises in the
    middle of the writing of another line; and it asks with another broadcast before each batch. This handler only takes
    a note.

    Attributes:
        grace_period: seconds.
        command: what a shell is given to go on with the run, if a shell has started it.
        signum: of the first signal, or 0.
        asked_at: when that came, by ``time.monotonic()``.
        can_be_cut: whether nothing is under way that changes what a checkpoint holds, or that writes one.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.grace_period, self.command = GRACE_PERIOD, ""
        self.signum, self.can_be_cut = 0, False
        self.asked_at = 0.0
        self._trainer: Any = weakref.proxy(trainer)
        self._must_cut = self._is_frozen = False
        self._lock, self._is_decided, self._is_over = threading.RLock(), threading.Event(), threading.Event()
        trainer._signal_connector._sigterm_notifier_fn = self.note  # type: ignore[method-assign, assignment]
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = self.agree  # type: ignore[method-assign]

    @property
    def exit_code(self) -> int:
        """What a shell or a scheduler expects of a process that the signal ended."""
        return 128 + (self.signum or signal.SIGTERM)

    def note(self, signum: int, frame: FrameType | None) -> None:
        """The signal handler, of both signals."""
        if self._must_cut:  # it is the watch that calls
            self._must_cut = False
            self._cut()
        elif not self.signum:
            self.signum, self.asked_at = signum, time.monotonic()
            launcher = self._trainer.strategy.launcher
            if launcher is not None:
                launcher.kill(signum)
            if self._trainer.world_size == 1 or not self._trainer.training:
                self._trainer._signal_connector.received_sigterm = True
        elif time.monotonic() - self.asked_at > intervals.SAME_SIGNAL_GRACE and not is_interactive():
            self._end("ended by a second signal")

    def agree(self) -> None:
        """Before a batch: stop if any rank was asked to."""
        asked = int(all_reduce(torch.tensor(self.signum), "max", name="next batch"))
        if asked:
            if not self.signum:  # another rank was
                self.asked_at, self.signum = time.monotonic(), asked
            self.keep_step()  # what follows is the saving
            self._trainer._signal_connector.received_sigterm = True
            raise SIGTERMException

    def keep_step(self) -> None:
        """Say that the step under way changes from here on what a checkpoint holds, so that it has to be finished."""
        with self._lock:
            if not self._is_frozen:
                self.can_be_cut = False
                return
        self._is_decided.wait()  # a cut comes as a signal, here at the latest
        self.can_be_cut = False

    def watch(self) -> None:
        """Have a thread see to the end of the grace period from here on."""
        self._is_over.clear()
        threading.Thread(target=self._watch, name="stop-signal", daemon=True).start()

    def close(self) -> None:
        """Leave the process alone: the run is over."""
        self._is_over.set()
        self.signum, self.can_be_cut = 0, False

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
            if left < self.grace_period / 2 and self.can_be_cut and not has_tried:
                has_tried = connection() is not None
                self._try_to_cut()
            if self._is_over.wait(min(intervals.POLL_INTERVAL, left)):
                return
        if not is_interactive():
            self._end(f"ended, since the step under way was not over {self.grace_period:g} s after the signal")

    def _remaining(self) -> float:
        """Seconds of the grace period."""
        return max(0.0, self.asked_at + self.grace_period - time.monotonic())

    def _try_to_cut(self) -> None:
        """Interrupt the main thread where it samples, if all ranks sample."""
        with self._lock:
            if self._must_cut:  # the signal before has not been delivered yet
                return
            self._is_frozen = can_cut = self.can_be_cut
            self._is_decided.clear()
        must_cut = False
        try:
            must_cut = self._agree_to_cut(can_cut)
        finally:
            if not must_cut:
                self._unfreeze()
        if must_cut:  # the main thread stays frozen until the signal has reached it
            self._must_cut = True
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, self.signum)

    def _unfreeze(self) -> None:
        self._is_frozen = False
        self._is_decided.set()

    def _agree_to_cut(self, can_cut: bool) -> bool:
        """Whether all ranks can leave their step: one in its update would wait for those that left."""
        shared = connection()
        if shared is None:
            return can_cut
        notes, ranks = shared.notes, range(self._trainer.world_size)
        try:
            notes.set(f"cut/{self._trainer.global_rank}", "yes" if can_cut else "no")
            end = time.monotonic() + min(intervals.CUT_GRACE, self._remaining() / 2)
            votes = [notes.get(f"cut/{rank}") for rank in ranks]
            while None in votes and time.monotonic() < end:
                time.sleep(intervals.SHORT_POLL_INTERVAL)
                votes = [notes.get(f"cut/{rank}") for rank in ranks]
            return notes.settle("cut", "yes" if set(votes) == {"yes"} else "no") == "yes"
        except StoreError:
            return False

    def _cut(self) -> None:
        """In the main thread: leave the step, and whatever collective it waits in."""
        self._unfreeze()
        if not self.can_be_cut:
            return
        self.can_be_cut = False
        if connection() is not None:
            renew_connection()
            watch = active_watch()
            if watch is not None:
                watch.keeps_groups = True
            # Threads of the connection that was left may wait for other ranks until those are gone.
            Finalize(None, exit_now, args=(self.exit_code,), exitpriority=-99)
        raise SIGTERMException

    def _end(self, reason: str) -> None:
        """End this process and the ranks that it has started, whatever they are doing."""
        with contextlib.suppress(OSError):
            os.write(2, f"{reason}\n".encode())
        watch = active_watch()
        if watch is not None:
            watch.tell_end(self.exit_code)
        launcher = self._trainer.strategy.launcher
        for child in getattr(launcher, "procs", ()):
            child.kill()
        os._exit(self.exit_code)


_signals: weakref.WeakKeyDictionary[Trainer, StopSignal] = weakref.WeakKeyDictionary()


def stop_signal(trainer: Trainer) -> StopSignal:
    """Return a Trainer's."""
    if trainer not in _signals:
        _signals[trainer] = StopSignal(trainer)
    return _signals[trainer]


def is_interactive() -> bool:
    """Whether the process outlives its runs, as a notebook's and Python's prompt do."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules
