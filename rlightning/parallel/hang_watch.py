"""Detects ranks that hang: each rank's heartbeat carries its position and whether it waits for other ranks.

::

    each rank      its status  ->  rank 0, every HEARTBEAT_INTERVAL
    rank 0         its status  ->  the rank, as an answer
    rank 0         decides by the reports which ranks hang
    other ranks    decide whether rank 0 hangs if it does not answer

Seconds without a heartbeat are counted by :class:`~rlightning.processes.liveness.Heartbeat`, so that no rank of a job
that was suspended as a whole counts as hanging.
"""

import logging
import os
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rlightning import intervals
from rlightning.parallel.barrier import name_ranks
from rlightning.parallel.cpu_group import Connection, barrier_timeout
from rlightning.parallel.last_seen import find_position
from rlightning.parallel.stacks import StackRecorder, do_nothing
from rlightning.processes.liveness import Heartbeat
from rlightning.processes.process_table import identify_process, kill_process
from rlightning.python_values import JsonObject

log = logging.getLogger(__name__)

MAX_UNANSWERED = 8
"""Maximum number of consecutive reports to rank 0 without an answer."""


@dataclass(frozen=True)
class Status:
    """What a heartbeat reports of a rank: what its main thread executes, whether it waits for other ranks, and how long
    it has made no progress.

    Attributes:
        where: what the rank's main thread executes, as in "in save (my.py, line 3)" or "at barrier 'save'".
        waits_in: whether the rank visibly waits for other ranks, and in what.
        stuck_seconds: seconds since ``where`` last changed.
        process: identity from :func:`identify_process`.
    """

    where: str
    waits_in: Literal["", "barrier", "collective"]
    stuck_seconds: float
    stack: str = ""
    process: str = ""


class RankState(Heartbeat):
    """The last status that a rank has reported, and the seconds since its last heartbeat.

    Args:
        status: status in the rank's last heartbeat; None before the first one.
    """

    def __init__(self, status: Status | None = None, silent_seconds: float = 0.0) -> None:
        super().__init__(intervals.HEARTBEAT_INTERVAL)
        self.status, self.silent_seconds = status, silent_seconds

    def tick(self) -> float:
        """Add the time since the last call, at most two intervals, to the rank's seconds without a heartbeat, and
        return these seconds.
        """
        self.interval = intervals.HEARTBEAT_INTERVAL
        return super().tick()

    @property
    def runs(self) -> bool:
        """Whether the rank's last heartbeat is recent; if not, its process is suspended, dead or unreachable."""
        return self.silent_seconds < intervals.SILENT_AFTER

    @property
    def stuck_seconds(self) -> float:
        """Seconds since the rank's main thread last made progress, as far as known."""
        return 0.0 if self.status is None else self.status.stuck_seconds

    @property
    def waits(self) -> bool:
        """Whether the rank's last heartbeat says that it waits for other ranks, at a barrier or in a collective."""
        return self.status is not None and bool(self.status.waits_in)

    def describe(self) -> str:
        """Return what the rank was last known to execute, as the end of a sentence that begins with "rank 1"."""
        if self.status is None:
            return "has given no heartbeat yet"
        if self.runs:
            return f"is {self.status.where}"
        return f"does not run, and was last seen {self.silent_seconds:.0f} s ago {self.status.where}"


class HangWatch(threading.Thread):
    """Thread that sends this rank's heartbeats, monitors those of others, and calls ``on_hang`` if a rank hangs.

    Args:
        others: the ranks to monitor: all others on rank 0, and rank 0 on any other.
        send: calls a method of rank 0's failure server.
        on_hang: called once, when the run must end, with the hanging rank and the reason, a text that follows "rank 1
            ".

    Attributes:
        needs_answer: whether this rank has failed, and waits for rank 0's answer.
    """

    def __init__(
        self,
        rank: int,
        others: Sequence[int],
        shared: Connection,
        send: Callable[..., None],
        recorder: StackRecorder,
        on_hang: Callable[[int, str], None],
    ) -> None:
        super().__init__(name="hang-watch", daemon=True)
        self.rank, self.needs_answer = rank, False
        self._shared, self._send, self._recorder, self._on_hang = shared, send, recorder, on_hang
        recorder.forward = self.record_others
        self._thread = threading.get_ident()
        self._process = identify_process(os.getpid())
        self._others = {other: RankState() for other in others}
        self._key: tuple[int, int] | None = None
        self._stuck_seconds, self._num_unanswered = 0.0, 0
        self._next_report = intervals.WAIT_REPORT_DELAY
        self._over = threading.Event()

    def run(self) -> None:
        """Send heartbeats and check for hanging ranks, until :meth:`stop`."""
        while not self._over.wait(intervals.HEARTBEAT_INTERVAL):
            for state in list(self._others.values()):
                state.tick()
            own = self.make_report()
            # If rank 0 is suspended it reads nothing, and the unread messages would eventually close the connection.
            if self.rank == 0 or self._num_unanswered < MAX_UNANSWERED:
                self._num_unanswered += 1
                self._send("report", asdict(own))
            if self.rank != 0 and self._others[0].runs:
                continue
            states = dict(sorted({**self._others, self.rank: RankState(own)}.items()))
            self._log_wait(states)
            hang = self._find_hang(states)
            if hang is not None:
                self._on_hang(*hang)
                return

    def stop(self) -> None:
        """Stop sending heartbeats, and monitoring those of other ranks."""
        self._over.set()
        self._recorder.forward = do_nothing

    def receive(self, rank: int, status: JsonObject) -> None:
        """Record another rank's heartbeat."""
        if rank in self._others:
            self._num_unanswered = 0
            self._others[rank].status = Status(**status)
            self._others[rank].beat()

    def remove(self, rank: int) -> None:
        """Stop monitoring a rank that has ended without failure."""
        self._others.pop(rank, None)

    def find_silent(self) -> dict[int, Status]:
        """Return, by rank, the last status of the monitored ranks whose heartbeats no longer arrive."""
        states = dict(self._others)
        return {rank: one.status for rank, one in states.items() if one.status is not None and not one.runs}

    def kill_silent(self, among: Container[int]) -> None:
        """Kill those of the given ranks whose heartbeats have stopped: they cannot end by themselves."""
        silent = self.find_silent()
        for rank, status in silent.items():
            if rank in among:
                kill_process(status.process)
                if 0 not in silent:
                    self._send("relay", "kill", status.process, waits=True)

    def record_others(self, reason: str) -> None:
        """Have the other ranks append their stack traces to the run's ``stacks.txt``, and append those last reported by
        ranks whose heartbeats have stopped.
        """
        if 0 not in self.find_silent():
            self._send("relay", "record_stacks", reason)
        self.record_silent(reason)

    def record_silent(self, reason: str) -> None:
        """Append the stack traces last reported by ranks whose heartbeats have stopped to the run's ``stacks.txt``, on
        ranks 0 and 1; do nothing on others, so that the file does not repeat them.
        """
        for rank, status in self.find_silent().items() if self.rank <= 1 else ():
            text = f"It does not run. Its main thread was last seen {status.where}:\n{status.stack}"
            self._recorder.append(reason, text, name=f"rank {rank}, seen from rank {self.rank}")

    def make_report(self) -> Status:
        """Return this rank's current status, for its heartbeat."""
        position = find_position(self._thread)
        key = (self._shared.num_barriers, position.key)
        self._stuck_seconds = self._stuck_seconds + intervals.HEARTBEAT_INTERVAL if key == self._key else 0.0
        self._key = key
        where, waits_in = position.where, ""
        if self._shared.waits_at is not None:
            where, waits_in = f"at barrier '{self._shared.waits_at}'", "barrier"
        elif position.is_in_collective:
            where, waits_in = f"in a collective, {where}", "collective"
        return Status(where, waits_in, self._stuck_seconds, position.stack, self._process)  # type: ignore[arg-type]

    def _log_wait(self, states: Mapping[int, RankState]) -> None:
        """Log, at growing intervals, which ranks others wait for; only one of the waiting ranks logs."""
        waiting, missing = find_missing(states, intervals.WAIT_REPORT_DELAY)
        if not missing:
            self._next_report = intervals.WAIT_REPORT_DELAY
            return
        seconds = min(states[rank].stuck_seconds for rank in waiting)
        if seconds >= self._next_report and self.rank <= 1:
            self._next_report = 2 * seconds
            log.warning("Waiting: %s", describe_wait(waiting, missing, states))

    def _find_hang(self, states: Mapping[int, RankState]) -> tuple[int, str] | None:
        """Return a hanging rank and the reason if the run must end because of it; barriers have their own deadlines."""
        if self.needs_answer and self.rank != 0:
            return 0, f"hangs: it {states[0].describe()}"
        waiting, missing = find_missing(states, barrier_timeout() + intervals.HANG_GRACE, at_barriers=False)
        if not is_known(waiting, missing, states):
            return None
        return missing[0], f"hangs: {describe_wait(waiting, missing, states)}"


def find_missing(
    states: Mapping[int, RankState], seconds: float, *, at_barriers: bool = True
) -> tuple[list[int], list[int]]:
    """Return the ranks that have waited for others without progress for ``seconds``, and the ranks for which they wait.

    A rank waits if it is visibly at a barrier or in a collective. A rank without progress may wait if another rank has
    not run for as long, or if no rank makes progress and they execute different code (:func:`is_known`).

    Args:
        at_barriers: whether waiting at a barrier counts.
    """
    running = {rank: one.status for rank, one in states.items() if one.runs and one.status is not None}
    counted = {rank: status for rank, status in running.items() if at_barriers or status.waits_in != "barrier"}
    stuck = [rank for rank, status in counted.items() if status.stuck_seconds >= seconds]
    waiting = [rank for rank in stuck if running[rank].waits_in]
    silent = [rank for rank, one in states.items() if not one.runs and (waiting or one.silent_seconds >= seconds)]
    if stuck and silent:
        return waiting or stuck, silent
    if not stuck or not (waiting or len(stuck) == len(states)):
        return [], []
    waiting = waiting or [rank for rank in stuck if running[rank].where == running[stuck[0]].where]
    elsewhere = [rank for rank in running if running[rank].where != running[waiting[0]].where]
    missing = [rank for rank in elsewhere if not running[rank].waits_in] or [r for r in elsewhere if r in stuck]
    return (waiting, missing) if missing else ([], [])


def is_known(waiting: Sequence[int], missing: Sequence[int], states: Mapping[int, RankState]) -> bool:
    """Return whether it is certain that ranks hang, so that the run must end: a missing rank sends no heartbeats, or a
    waiting rank is at a barrier or in a collective.

    The ranks are the result of :func:`find_missing`.

    Running ranks, none of which visibly waits for another, may each wait for something else, such as an engine or a
    reward.
    """
    is_wait_seen = any(states[rank].waits for rank in waiting)
    return any(is_wait_seen or not states[rank].runs for rank in missing)


def describe_wait(waiting: Sequence[int], missing: Sequence[int], states: Mapping[int, RankState]) -> str:
    """Return a sentence about the result of :func:`find_missing`: which ranks wait, where, and for which ranks."""
    first = states[waiting[0]].status
    assert first is not None
    seconds = min(states[rank].stuck_seconds for rank in waiting)
    places = "; ".join(f"rank {rank} {states[rank].describe()}" for rank in missing)
    is_seen = any(states[rank].waits for rank in waiting)
    verb = f"{'have' if len(waiting) > 1 else 'has'} {'waited' if is_seen else 'been'}"
    link = "" if is_seen else ", perhaps waiting"
    return f"{name_ranks(waiting)} {verb} {seconds:.0f} s {first.where}{link} for {name_ranks(missing)}: {places}."
