"""Ends all ranks at the first failure of any rank, at any point; only the failed rank shows a traceback.

A hanging rank counts as failed, too (:mod:`~rlightning.parallel.hang_watch`).
"""

import asyncio
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
from typing import Self

import torch.distributed as dist

from rlightning import intervals
from rlightning.error_report import INTERRUPTED, show_error
from rlightning.parallel.barrier import BarrierError, barrier, report_arrivals, write_failure
from rlightning.parallel.cpu_group import Connection, barrier_timeout, connection
from rlightning.parallel.failure_server import FailureServer, connect_rank
from rlightning.parallel.hang_watch import HangWatch
from rlightning.parallel.rank_failure import DISCONNECTED, Failure, is_failure, is_of_collective
from rlightning.parallel.rank_store import StoreError
from rlightning.parallel.stacks import StackRecorder, record_all, start_recorder
from rlightning.processes.liveness import Deadline
from rlightning.processes.process_table import kill_process
from rlightning.python_values import JsonObject
from rlightning.rpc import LoopThread, Peer, RPCError
from rlightning.torch_internals import nccl_backends

log = logging.getLogger(__name__)

SIGNAL = signal.SIGRTMIN
"""Signal that interrupts a system call of the main thread; it has no other use."""


class PeerFailure(SystemExit):
    """Raised in the main thread of a rank when another rank's failure ends the run.

    ``except Exception`` does not catch this exception. The process ends without a traceback, after ``finally`` blocks
    and callbacks' ``on_exception`` have run.
    """


class FailureWatch:
    """Ends all ranks when one fails: by an exception, Ctrl-C, ``kill -9``, a lost host, or a hang.

    In the other ranks :class:`PeerFailure` is raised in the main thread, which interrupts Python code, sleeping and
    waiting for processes; NCCL's collectives are aborted. A process that cannot be interrupted is killed after the
    grace period.

    In plain PyTorch the watch is a context around the loop, after the process group is initialized; the strategies of
    this package start it themselves::

        dist.init_process_group()
        with FailureWatch():
            train()
        dist.destroy_process_group()

    When leaving the context, rank 0 waits until the other ranks have left it. In a single process it does nothing.

    Args:
        grace: seconds between the first failure and the killing of remaining processes.
        folder: folder for ``stacks.txt``, which is written before a hanging rank ends the run; None for the working
            directory.

    Attributes:
        keeps_groups: whether process groups are not destroyed at the end, because a collective was interrupted.
    """

    def __init__(self, *, grace: float = intervals.CLEANUP_GRACE, folder: Path | None = None) -> None:
        self.grace = grace
        self.folder = Path() if folder is None else folder
        self.rank = 0
        self._ranks = range(1)
        self.children: list[subprocess.Popen[bytes]] = []
        self._loop: LoopThread | None = None
        self._peer: Peer | None = None  # rank 0's server
        self._server: FailureServer | None = None
        self._hang_watch: HangWatch
        self._first: Failure | None = None
        self._is_first_known = threading.Event()
        self._error: BaseException | None = None
        self._own = Failure(0, "")  # the failure that `_error` describes
        self._is_leaving = self._is_ending = False
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
        """Connect this rank to rank 0's failure server; every rank must call this.

        From then on, an uncaught exception in this process ends all ranks.
        """
        global _active
        shared = connection()
        if shared is None or self._peer is not None:
            return
        self.rank, self._ranks = shared.store.rank, shared.store.ranks
        others = self._ranks[1:] if self.rank == 0 else [0]
        recorder = start_recorder(self.folder, f"rank {self.rank}")
        self._hang_watch = HangWatch(self.rank, others, shared, self._send, recorder, self._end_hung)
        self._connect(shared, recorder)
        os.register_at_fork(after_in_child=self._close_copies)
        # After the other functions at exit. Processes that multiprocessing starts do not run atexit functions.
        Finalize(None, self._end_failed, exitpriority=-100)
        # In other threads no handler can be installed, and the signal would end the process without a message.
        self._can_interrupt = threading.current_thread() is threading.main_thread()
        if self._can_interrupt:
            signal.signal(SIGNAL, self._interrupt)
        self._usual_excepthook = sys.excepthook
        sys.excepthook = self._show_uncaught
        self._hang_watch.start()
        _active = self
        barrier("failure watch: connected")

    def _connect(self, shared: Connection, recorder: StackRecorder) -> None:
        """Start the server on rank 0, and connect this rank to the server."""
        # Closed by stop(), which may be called after the functions of atexit.
        self._loop = LoopThread("failure-watch", closes_at_exit=False)
        hang_watch = self._hang_watch
        if self.rank == 0:
            self._server = FailureServer(
                len(self._ranks),
                on_first=lambda failure: write_failure(failure.rank, failure.text),
                find_cause=self._find_cause_of_death,
                on_report=hang_watch.receive,
                on_leave=hang_watch.remove,
            )
            self._loop.run(self._server.start())
            # Addresses at which other hosts may reach this one, the host name last.
            addresses = [*filter(None, [os.environ.get("MASTER_ADDR")]), socket.gethostname()]
            place = [addresses, self._server.port, self._server.key.hex(), asdict(hang_watch.make_report())]
            shared.store.set("failure_server", json.dumps(place))
        barrier("failure watch: listening")
        addresses, port, key, status = json.loads(shared.store.get("failure_server") or "")
        hang_watch.receive(0, status)
        if addresses[-1] == socket.gethostname():
            addresses = ["localhost", *addresses]

        async def rank() -> int:
            return self.rank

        async def end(failure: JsonObject) -> None:
            self._learn(Failure(**failure))

        async def report(status: JsonObject) -> None:
            hang_watch.receive(0, status)

        async def record_stacks(reason: str) -> None:
            recorder.record(reason)
            if self.rank == 0:
                hang_watch.record_silent(reason)

        async def kill(process: str) -> None:
            kill_process(process)

        methods = {method.__name__: method for method in (rank, end, report, record_stacks, kill)}
        self._peer = self._loop.run(connect_rank(addresses, port, bytes.fromhex(key), methods))
        self._loop.submit(self._watch_server(self._peer))
        self._send("report", asdict(hang_watch.make_report()))

    async def _watch_server(self, peer: Peer) -> None:
        """Wait for the connection to rank 0 to end, then end this process."""
        await peer.wait_closed()
        if not self._is_leaving and self._first is None:
            silent = self._hang_watch.find_silent()
            # Another rank has killed it if it was suspended.
            self._learn(Failure(0, f"hangs: it was last seen {silent[0].where}" if 0 in silent else DISCONNECTED))

    def stop(self) -> None:
        """Report that this rank ends without failure. Rank 0 waits until all others have reported this.

        Raises:
            PeerFailure: another rank failed instead.
        """
        global _active
        if self._peer is None or self._loop is None or self._is_ending:
            return
        self._is_leaving = True
        if self.rank > 0:
            self._hang_watch.stop()
        self._send("leave", waits=True)
        if self._server is not None:
            self._await_others(self._server)
            self._hang_watch.stop()
            self._loop.run(self._server.close())
        self._loop.run(self._peer.close())
        self._loop.close()
        self._peer, _active = None, None
        sys.excepthook = self._usual_excepthook

    def _await_others(self, server: FailureServer) -> None:
        """Wait on rank 0 until all other ranks have ended or failed."""
        shared, deadline = connection(), Deadline(barrier_timeout())
        with contextlib.nullcontext() if shared is None else shared.waiting_at("the end of the run"):
            while self._first is None and not deadline.is_over and not server.is_over.wait(0.1):
                pass
        if self._first is not None:
            self._is_ending = True
            raise PeerFailure(self._first.exit_code)
        if not server.is_over.is_set():
            record_all(f"others than rank 0 have not ended after {barrier_timeout():g} s")
            log.warning("Rank 0 ends, but others have not after %g s.", barrier_timeout())

    def stop_at_exit(self) -> None:
        """Have :meth:`stop` called, and the process groups destroyed, at the interpreter's exit."""
        Finalize(None, self._stop_finally, exitpriority=100)

    def report(self, error: BaseException) -> Failure:
        """Report this rank's failure to all ranks, and return the first failure of any rank.

        This process is killed if it has not ended within the grace period. Only the first call reports; later calls
        only return the first failure.
        """
        own = Failure.of(self.rank, error)
        if self._peer is None:
            return own
        if self._error is None and not isinstance(error, PeerFailure):
            self._error, self._own, self._is_ending = error, own, True
            self._hang_watch.needs_answer = True
            if self._first is None and is_of_collective(error):
                own = self._name_missing(error, own)
            if self._first is not None:
                self._send("clean_up")
            else:
                self._send("fail", asdict(own))
        self._is_first_known.wait(intervals.FAILURE_ANSWER_TIMEOUT)
        return self._first or own

    def give_up(self, error: BaseException) -> Failure:
        """Report an uncaught error to all ranks; return the first failure of any rank, with whose exit code this
        process ends.
        """
        self._is_fatal = True
        return self.report(error)

    def tell_end(self, code: int) -> None:
        """Report to rank 0 that a signal ends this process, and wait for the response; all ranks then end with
        the same exit code.
        """
        self._send("fail", asdict(Failure(self.rank, "was ended by a signal", code, is_foreseen=True)), waits=True)

    def is_first(self, failure: Failure) -> bool:
        """Return whether ``failure``, the first of all ranks, is this rank's, so that the caller must show the error.

        The error is marked as shown.
        """
        self._is_shown = True
        return failure.rank == self.rank

    def _name_missing(self, error: BaseException, own: Failure) -> Failure:
        """Return the failure of a collective, with the ranks that did not take part."""
        missing = report_arrivals(self._is_first_known.is_set)
        if not missing:
            return own
        record_all(f"rank {self.rank} {own.text} ({missing})")
        error.add_note(missing)
        return replace(own, text=f"{own.text} ({missing})")

    async def _find_cause_of_death(self, rank: int) -> str:
        """Return how a disconnected rank has ended, as far as this process knows."""
        if not 0 < rank <= len(self.children):
            return DISCONNECTED
        child, deadline = self.children[rank - 1], Deadline(intervals.RANK_EXIT_GRACE)
        while (code := child.poll()) is None:
            if deadline.is_over:
                return DISCONNECTED
            await asyncio.sleep(intervals.SHORT_POLL_INTERVAL)
        if code >= 0:
            return f"ended without a word, with exit code {code}"
        name = signal.Signals(-code).name
        return f"was killed by {name}{' (out of host memory?)' if name == 'SIGKILL' else ''}"

    def _send(self, method: str, *arguments: object, waits: bool = False) -> None:
        """Call a method of rank 0's server, if connected; with ``waits``, wait until it has run."""
        if self._peer is None or self._loop is None:
            return
        if waits:
            with contextlib.suppress(RPCError):
                self._loop.run(self._peer.call(method, self.rank, *arguments), intervals.FAILURE_ANSWER_TIMEOUT)
        else:
            self._loop.submit(self._peer.notify(method, self.rank, *arguments))

    def _end_hung(self, rank: int, reason: str) -> None:
        """End the run because a rank hangs: rank 0 reports it to all; if rank 0 itself hangs, this rank ends alone."""
        failure = Failure(rank, reason)
        if self._error is None:
            record_all(f"rank {rank} {reason}")
        elif not is_of_collective(self._error) and not isinstance(self._error, BarrierError | StoreError):
            failure = self._own  # the hang did not cause this failure
        if rank == 0 != self.rank:
            self._learn(failure)
        else:
            self._send("fail", asdict(failure))

    def _learn(self, first: Failure) -> None:
        """Start a thread that ends this process because of the first failure of any rank."""
        if self._first is None:
            self._first = first
            threading.Thread(target=self._end, args=(first,), name="failure-end", daemon=True).start()

    def _end(self, first: Failure) -> None:
        if first.rank != self.rank and first.exit_code != INTERRUPTED and not first.is_foreseen:
            log.error("rank %d ends because rank %d %s", self.rank, first.rank, first.text)
        self._is_first_known.set()
        if not self._is_ending and self._can_interrupt:
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, SIGNAL)
        # Python's threads do not run while the interpreter shuts down, when destructors can wait forever.
        faulthandler.dump_traceback_later(self.grace + 5, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115
        deadline = Deadline(self.grace)
        self._hang_watch.kill_silent([first.rank])
        # A main thread that cleans up may still wait for work queued after a collective; any other is in a collective.
        if Deadline(intervals.ABORT_DELAY).wait_until(lambda: self._is_ending):
            time.sleep(intervals.ABORT_DELAY)
        abort_device_groups(deadline)
        time.sleep(deadline.remaining)
        self._hang_watch.kill_silent(self._ranks)
        if self._error is not None and first.rank == self.rank and not self._is_shown:
            show_error(self._error)
        end_children(self.children, 0)
        exit_now(first.exit_code)

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self._first is not None and not self._is_ending:
            self._is_ending = self._is_fatal = True
            self._send("clean_up")
            raise PeerFailure(self._first.exit_code)

    def _show_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Show the traceback of an uncaught error only if this rank failed first."""
        if self.is_first(self.give_up(error)):
            self._usual_excepthook(kind, error, trace)

    def _stop_finally(self) -> None:
        try:
            self.stop()
        except PeerFailure as failure:
            self._end_children()
            exit_now(failure.code)
        if not self._is_fatal and not self.keeps_groups and dist.is_initialized():
            # A thread of gloo that releases its last tensor after the interpreter's end aborts the process.
            dist.destroy_process_group()  # https://github.com/pytorch/pytorch/issues/190489
        self._end_children()

    def _end_failed(self) -> None:
        """Exit after an uncaught failure without running destructors.

        A thread of gloo whose collective failed may release its tensors at any time, which aborts a process whose
        interpreter has ended (https://github.com/pytorch/pytorch/issues/190489).
        """
        if self._is_fatal and (self._first is not None or self._error is not None):
            self._hang_watch.kill_silent(self._ranks)
            exit_now((self._first or self._own).exit_code)

    def _end_children(self) -> None:
        """Wait for child ranks up to the grace period; kill those that have not ended if a rank has failed."""
        if self._first is not None and self._server is not None:
            reacted = self._server.cleaning_up

            def find_stuck() -> "list[subprocess.Popen[bytes]]":
                ranks = enumerate(self.children, start=1)
                return [child for rank, child in ranks if rank not in reacted and child.poll() is None]

            Deadline(intervals.STUCK_GRACE).wait_until(lambda: not find_stuck())
            for child in find_stuck():
                child.kill()
        end_children(self.children, self.grace)

    def _close_copies(self) -> None:
        """Close a forked child's copies of the connections, which would stay open after this process has ended."""
        if self._server is not None:
            self._server.close_copies()
        if self._peer is not None:
            self._peer.close_copy()
            self._peer = None


_active: FailureWatch | None = None


def active_watch() -> FailureWatch | None:
    """Return the failure watch that was started in this process; None if there is none, or it has been stopped."""
    return _active


def report_failure(error: BaseException) -> Failure | None:
    """Report ``error`` to all ranks through the active FailureWatch; return the failure that was reported first.

    Without a watch, or if :func:`is_failure` is False for the error, report nothing and return None.
    """
    return _active.report(error) if _active is not None and is_failure(error) else None


def end_children(children: "list[subprocess.Popen[bytes]]", grace: float) -> None:
    """Wait up to ``grace`` seconds in total for child processes to end, and kill those that still run."""
    deadline = Deadline(grace)
    for child in children:
        try:
            child.wait(deadline.remaining)
        except subprocess.TimeoutExpired:
            child.kill()


def exit_now(code: object) -> None:
    """Exit this process immediately with ``code`` (1 if it is no number), without destructors or exit functions."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else 1)


def abort_device_groups(deadline: Deadline) -> None:
    """Abort this rank's NCCL communicators, so that threads waiting in collectives continue.

    A waiting rank gets garbage from its collective, or an error, and cannot use the groups any more. Aborts may wait
    for each other, so that each runs in its own thread.
    """
    threads = [threading.Thread(target=backend.abort, daemon=True) for backend in nccl_backends()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline.remaining)
