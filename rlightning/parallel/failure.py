"""The first failure anywhere ends all ranks, whatever they do, and only the rank that failed shows a traceback.

A rank that hangs is one that fails, too (:mod:`~rlightning.parallel.hang_watch`).
"""

import contextlib
import faulthandler
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from multiprocessing.util import Finalize
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch.distributed as dist

from rlightning import intervals
from rlightning.error_report import INTERRUPTED, exit_code, show_error
from rlightning.errors import find_run_error
from rlightning.foreign_text import cut_line
from rlightning.parallel.barrier import BarrierError, barrier, note_failure, roll_call
from rlightning.parallel.cpu_group import Connection, StoreError, barrier_timeout, connection, leave_groups
from rlightning.parallel.device_groups import abort_device_groups
from rlightning.parallel.failure_hub import GONE, Failure, FailureHub, Link, connect
from rlightning.parallel.hang_watch import HangWatch
from rlightning.parallel.process_identity import kill_process
from rlightning.parallel.stacks import StackRecorder, record_all, start_recorder

log = logging.getLogger(__name__)

TERMINATED = 143
"""What a scheduler expects of a process that SIGTERM ended."""
SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR2)
"""Wakes the main thread out of a system call; a signal that nobody else uses."""


class PeerFailure(SystemExit):
    """Raised in the main thread of a rank whose run another rank's failure ended.

    It passes an ``except Exception`` and ends the process without a traceback, but lets ``finally`` and callbacks'
    ``on_exception`` have their turn.
    """


class FailureWatch:
    """Ends all ranks when one fails: by an exception, by Ctrl-C, by ``kill -9``, by a lost host, or as it hangs.

    The other ranks get :class:`PeerFailure` in their main thread, which interrupts Python code, sleeping and waiting
    for processes; collectives of NCCL are aborted. What nothing interrupts ends without cleaning up when the grace is
    over.

    In plain PyTorch it stands around the loop, once the process group is there; the strategies of this package start it
    themselves::

        dist.init_process_group()
        with FailureWatch():
            train()
        dist.destroy_process_group()

    Leaving it takes part in the end of all: rank 0 waits there until the others are through. Without several processes
    it does nothing.

    Args:
        grace: seconds between the first failure and the hard end of whatever is still there.
        folder: where ``stacks.txt`` is written before a rank that hangs ends the run; None is the current one.

    Attributes:
        keeps_groups: whether the process groups stay when this process ends: a collective in one was left.
    """

    def __init__(self, *, grace: float = intervals.CLEANUP_GRACE, folder: Path | None = None) -> None:
        self.grace = grace
        self.folder = Path() if folder is None else folder
        self.rank = 0
        self._ranks = range(1)
        self.children: list[subprocess.Popen[bytes]] = []
        self._link: Link | None = None
        self._hub: FailureHub | None = None
        self._hang_watch: HangWatch | None = None
        self._first: Failure | None = None
        self._is_known = threading.Event()
        self._error: BaseException | None = None
        self._own = Failure(0, "")  # of ``_error``
        self._is_ending = False
        self._can_interrupt = False
        self._is_shown = False
        self._is_fatal = False
        self.keeps_groups = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or not is_failure(error):
            self.stop()
        else:
            self.report(error)

    def start(self) -> None:
        """Connect all ranks; a collective. From here on this process's uncaught exceptions end the run."""
        global _active
        shared = connection()
        if shared is None or self._link is not None:
            return
        self.rank, self._ranks = dist.get_rank(), range(dist.get_world_size())
        others = self._ranks[1:] if self.rank == 0 else [0]
        recorder = start_recorder(self.folder, f"rank {self.rank}")
        self._hang_watch = HangWatch(self.rank, others, shared, self._send, recorder, self._end_hung)
        self._link = self._connect(shared, self._hang_watch)
        os.register_at_fork(after_in_child=self._let_go)
        # After what else is done at a process's end. Processes that multiprocessing starts know no atexit.
        Finalize(None, self._end_failed, exitpriority=-100)
        # Elsewhere no handler can be installed, and the signal would end the process without a word.
        self._can_interrupt = threading.current_thread() is threading.main_thread()
        if self._can_interrupt:
            signal.signal(SIGNAL, self._interrupt)
        self._usual_excepthook = sys.excepthook
        sys.excepthook = self._show_uncaught
        arguments = (self._link, self._hang_watch, recorder)
        threading.Thread(target=self._listen, args=arguments, name="failure-watch", daemon=True).start()
        self._hang_watch.start()
        _active = self
        barrier("failure watch: connected")

    def _connect(self, shared: Connection, hang_watch: HangWatch) -> Link:
        """Start the hub on rank 0, and connect this rank to it."""
        if self.rank == 0:
            self._hub = FailureHub(
                len(self._ranks), lambda failure: note_failure(failure.rank, failure.text), self._cause_of_death
            )
            self._hub.on_seen, self._hub.on_farewell = hang_watch.receive, hang_watch.remove
            self._hub.start()
            place = [_own_addresses(), self._hub.port, self._hub.token, asdict(hang_watch.make_heartbeat())]
            shared.notes.set("failure_hub", json.dumps(place))
        barrier("failure watch: listening")
        addresses, port, token, seen = json.loads(shared.notes.get("failure_hub") or "")
        hang_watch.receive(0, seen)
        if addresses[-1] == socket.gethostname():
            addresses = ["localhost", *addresses]
        link = connect(addresses, port, intervals.VERDICT_TIMEOUT)
        link.send({"token": token, "rank": self.rank})
        link.send({"seen": asdict(hang_watch.make_heartbeat())})
        return link

    def stop(self) -> None:
        """Say that this rank ends well. Rank 0 waits until the others have said so too.

        Raises:
            PeerFailure: one of them failed instead.
        """
        global _active
        if self._link is None or self._is_ending:
            return
        assert self._hang_watch is not None
        self._link.is_done = True
        if self._hub is None:
            self._hang_watch.stop()
        self._link.send({"bye": True})
        if self._hub is not None:
            self._await_others(self._hub)
            self._hang_watch.stop()
        self._link.hang_up()
        self._link, _active = None, None
        sys.excepthook = self._usual_excepthook

    def _await_others(self, hub: FailureHub) -> None:
        """Wait on rank 0 until all others have ended, well or not."""
        shared, end = connection(), time.monotonic() + barrier_timeout()
        with contextlib.nullcontext() if shared is None else shared.waiting_at("the end of the run"):
            while hub.is_alive() and self._first is None and time.monotonic() < end:
                hub.join(0.1)
        if hub.is_alive() and self._first is None:
            record_all(f"others than rank 0 have not ended after {barrier_timeout():g} s")
            log.warning("Rank 0 ends, but others have not after %g s.", barrier_timeout())
        if self._first is not None:
            self._is_ending = True
            raise PeerFailure(self._first.exit_code)

    def stop_at_exit(self) -> None:
        """Have the process, when it ends by whatever way Python knows, call :meth:`stop` and leave its groups."""
        Finalize(None, self._stop_finally, exitpriority=100)

    def report(self, error: BaseException) -> Failure:
        """Tell the others that this rank failed, and end it hard if it has not ended by itself after the grace.

        Args:
            error: what happened. Only the first call counts.

        Returns:
            The first failure of all ranks: this one's, unless another was earlier.
        """
        own = Failure(self.rank, describe(error), exit_code(error), is_foreseen=find_run_error(error) is not None)
        if self._link is None:
            return own
        if self._error is None and not isinstance(error, PeerFailure):
            self._error, self._own, self._is_ending = error, own, True
            if self._hang_watch is not None:
                self._hang_watch.needs_answer = True
            if self._first is None and is_of_collective(error):
                own = self._name_the_silent(error, own)
            if self._first is not None:
                self._link.send({"ending": True})
            else:
                self._link.send({"failed": asdict(own)})
        self._is_known.wait(intervals.VERDICT_TIMEOUT)
        return self._first or own

    def give_up(self, error: BaseException) -> Failure:
        """As :meth:`report`, of what nobody has caught: the process ends with the first failure's exit code."""
        self._is_fatal = True
        return self.report(error)

    def tell_end(self, code: int) -> None:
        """Tell the others that this process ends hard after a signal, so that they end with the same exit code.

        Args:
            code: its.
        """
        self._send({"failed": asdict(Failure(self.rank, "was ended by a signal", code, is_foreseen=True))})

    def is_first(self, failure: Failure) -> bool:
        """Whether this rank is the one to show what happened; it counts as shown from now on."""
        self._is_shown = True
        return failure.rank == self.rank

    def _name_the_silent(self, error: BaseException, own: Failure) -> Failure:
        """The failure of a collective, with the ranks that were not in it."""
        silent = roll_call(self._is_known.is_set)
        if not silent:
            return own
        record_all(f"rank {self.rank} {own.text} ({silent})")
        error.add_note(silent)
        return replace(own, text=f"{own.text} ({silent})")

    def _cause_of_death(self, rank: int) -> str:
        """What became of a rank whose connection closed without a farewell, as far as this process can know."""
        if not 0 < rank <= len(self.children):
            return GONE
        try:
            code = self.children[rank - 1].wait(intervals.RANK_EXIT_GRACE)
        except subprocess.TimeoutExpired:
            return GONE
        if code >= 0:
            return f"ended without a word, with exit code {code}"
        name = signal.Signals(-code).name
        return f"was killed by {name}{' (out of host memory?)' if name == 'SIGKILL' else ''}"

    def _listen(self, link: Link, hang_watch: HangWatch, recorder: StackRecorder) -> None:
        """Wait for word of a failure, and see to it that this process ends then."""
        while (messages := link.receive()) is not None:
            for message in messages:
                if "first" in message:
                    self._learn(Failure(**message["first"]))
                elif "kill" in message:
                    kill_process(message["kill"])
                elif "seen" in message:
                    hang_watch.receive(0, message["seen"])
                elif "stacks" in message:
                    recorder.record(message["stacks"])
                    if self.rank == 0:
                        hang_watch.record_silent(message["stacks"])
        if not link.is_done and self._first is None:
            silent = hang_watch.find_silent()
            # Another rank has killed it, if it did not run.
            self._learn(Failure(0, f"hangs: it was last seen {silent[0].where}" if 0 in silent else GONE))

    def _send(self, message: dict[str, Any]) -> None:
        """Send to the hub, while there is one."""
        link = self._link
        if link is not None:
            link.send(message)

    def _end_hung(self, rank: int, reason: str) -> None:
        """End the run for a rank that hangs; rank 0 tells all, unless it is the one."""
        failure = Failure(rank, reason)
        if self._error is None:
            record_all(f"rank {rank} {reason}")
        elif not is_of_collective(self._error) and not isinstance(self._error, BarrierError | StoreError):
            failure = self._own  # which is no consequence of the hang
        if rank == 0 != self.rank:
            self._learn(failure)
        else:
            self._send({"failed": asdict(failure)})

    def _learn(self, first: Failure) -> None:
        """Take note of the first failure, and have this process end, which takes as long as it takes."""
        if self._first is None:
            self._first = first
            threading.Thread(target=self._end, args=(first,), name="failure-end", daemon=True).start()

    def _end(self, first: Failure) -> None:
        if first.rank != self.rank and first.exit_code != INTERRUPTED and not first.is_foreseen:
            log.error("rank %d ends because rank %d %s", self.rank, first.rank, first.text)
        self._is_known.set()
        if not self._is_ending and self._can_interrupt:
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, SIGNAL)
        # Python's threads stand still while the interpreter shuts down, where destructors can wait for ever.
        faulthandler.dump_traceback_later(self.grace + 5, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115
        end = time.monotonic() + self.grace
        assert self._hang_watch is not None
        self._hang_watch.kill_silent([first.rank])
        if self._begins_to_end(intervals.ABORT_DELAY):
            time.sleep(intervals.ABORT_DELAY)  # it may yet wait for work that the device has queued behind a collective
        abort_device_groups(max(0.0, end - time.monotonic()))
        time.sleep(max(0.0, end - time.monotonic()))
        self._hang_watch.kill_silent(self._ranks)
        if self._error is not None and first.rank == self.rank and not self._is_shown:
            show_error(self._error)
        end_children(self.children, 0)
        exit_now(first.exit_code)

    def _begins_to_end(self, seconds: float) -> bool:
        """Whether the main thread begins to clean up within so long: a collective on a device keeps it from that."""
        end = time.monotonic() + seconds
        while not self._is_ending and time.monotonic() < end:
            time.sleep(intervals.SHORT_POLL_INTERVAL)
        return self._is_ending

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self._first is not None and not self._is_ending:
            self._is_ending = self._is_fatal = True
            if self._link is not None:
                self._link.send({"ending": True})
            raise PeerFailure(self._first.exit_code)

    def _show_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Show the traceback of the rank that failed first, and no other."""
        if self.is_first(self.give_up(error)):
            self._usual_excepthook(kind, error, trace)

    def _stop_finally(self) -> None:
        try:
            self.stop()
        except PeerFailure as failure:
            self._end_children()
            exit_now(failure.code)
        if not self._is_fatal and not self.keeps_groups:
            leave_groups()
        self._end_children()

    def _end_failed(self) -> None:
        """End a process in which nobody has caught the failure, without destroying anything.

        A thread of gloo's whose collective broke may let go of its tensors at any time, which aborts a process whose
        interpreter is gone (https://github.com/pytorch/pytorch/issues/190489).
        """
        if self._is_fatal and (self._first is not None or self._error is not None):
            assert self._hang_watch is not None
            self._hang_watch.kill_silent(self._ranks)
            exit_now((self._first or self._own).exit_code)

    def _end_children(self) -> None:
        """Wait for the ranks started here up to the grace; after a failure, not for those that nothing interrupts."""
        if self._first is not None and self._hub is not None:
            hub, end = self._hub, time.monotonic() + intervals.STUCK_GRACE
            stuck = {rank: child for rank, child in enumerate(self.children, start=1) if child.poll() is None}
            while stuck and time.monotonic() < end:
                time.sleep(intervals.SHORT_POLL_INTERVAL)
                stuck = {r: child for r, child in stuck.items() if child.poll() is None and r not in hub.ending}
            for child in stuck.values():
                child.kill()
        end_children(self.children, self.grace)

    def _let_go(self) -> None:
        """In a forked child, which would keep the connection open after this process's death."""
        if self._hub is not None:
            self._hub.close()
        if self._link is not None:
            self._link.close()
            self._link = None


_active: FailureWatch | None = None


def active_watch() -> FailureWatch | None:
    """The watch that this process takes part in."""
    return _active


def report_failure(error: BaseException) -> Failure | None:
    """Report to the active watch, if there is one and ``error`` is a failure; the first failure of all."""
    return _active.report(error) if _active is not None and is_failure(error) else None


def is_failure(error: BaseException) -> bool:
    """Whether ``error`` ends a run badly: everything but an exit without a code, or after SIGTERM."""
    return not isinstance(error, SystemExit) or error.code not in (None, 0, TERMINATED)


def is_of_collective(error: BaseException) -> bool:
    """Whether ``error`` is that of a collective, or of its connections: others may know more of its cause."""
    # gloo raises a bare RuntimeError that begins with its source file.
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error))


def describe(error: BaseException) -> str:
    """``error`` in one line."""
    if isinstance(error, KeyboardInterrupt):
        return "was interrupted"
    lines = str(error).strip().splitlines() or [""]
    return f"failed: {type(error).__name__}: {cut_line(lines[0])}".removesuffix(": ")


def end_children(children: "list[subprocess.Popen[bytes]]", grace: float) -> None:
    """Wait for processes up to ``grace`` seconds, then kill them."""
    end = time.monotonic() + grace
    for child in children:
        try:
            child.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()


def exit_now(code: object) -> None:
    """End this process, whatever it is doing; not even destructors run."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else 1)


def _own_addresses() -> list[str]:
    """Where other hosts may reach this process, which is rank 0; its host's name is the last."""
    main = os.environ.get("MASTER_ADDR")
    return [*([main] if main else []), socket.gethostname()]
