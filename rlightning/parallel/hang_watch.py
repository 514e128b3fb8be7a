"""Finds ranks that hang: each rank tells where it is by a heartbeat, and those that wait say for whom.

::

    each rank      its position  ->  rank 0, every HEARTBEAT_INTERVAL
    rank 0         its position  ->  the rank, as an answer
    rank 0         judges all ranks by their heartbeats
    other ranks    judge rank 0 once it does not answer

Seconds are counted by heartbeats of one's own rather than read off a clock: a job that was suspended as a whole accuses
none of its ranks.
"""

import logging
import os
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from rlightning import intervals
from rlightning.parallel.barrier import name_ranks
from rlightning.parallel.cpu_group import Connection, barrier_timeout
from rlightning.parallel.last_seen import find_position
from rlightning.parallel.process_identity import identify_process, kill_process
from rlightning.parallel.stacks import StackRecorder, do_nothing

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Heartbeat:
    """What a rank says of itself by a heartbeat.

    Attributes:
        where: what its main thread is at, as in "in save (my.py, line 3)" or "at barrier 'save'".
        waits_in: what it waits for other ranks in, as far as that can be told.
        stuck_seconds: for how long it has not moved.
        stack: of its main thread.
        process: see :func:`identify_process`.
    """

    where: str
    waits_in: Literal["", "barrier", "collective"]
    stuck_seconds: float
    stack: str = ""
    process: str = ""


@dataclass
class RankState:
    """What is known of a rank.

    Attributes:
        heartbeat: the last one; None before the first.
        silent_seconds: since then.
    """

    heartbeat: Heartbeat | None = None
    silent_seconds: float = 0.0

    @property
    def runs(self) -> bool:
        """Whether its heartbeats come."""
        return self.silent_seconds < intervals.SILENT_AFTER

    def describe(self) -> str:
        """Return where it is or was, to follow upon "rank 1 "."""
        if self.heartbeat is None:
            return "has given no heartbeat yet"
        if self.runs:
            return f"is {self.heartbeat.where}"
        return f"does not run, and was last seen {self.silent_seconds:.0f} s ago {self.heartbeat.where}"


class HangWatch(threading.Thread):
    """One rank's heartbeat, and its watch over others.

    Args:
        rank: this one.
        others: the ranks to watch: on rank 0 all others, elsewhere rank 0.
        shared: the ranks' connection.
        send: gives rank 0 a message of :mod:`~rlightning.parallel.failure_hub`.
        recorder: of this process's stacks.
        on_hang: called once with a rank that hangs and the reason, to follow upon "rank 1 ", when the run must end.
    """

    def __init__(
        self,
        rank: int,
        others: Sequence[int],
        shared: Connection,
        send: Callable[[dict[str, Any]], None],
        recorder: StackRecorder,
        on_hang: Callable[[int, str], None],
    ) -> None:
        super().__init__(name="hang-watch", daemon=True)
        self.rank = rank
        self.needs_answer = False
        """Set when rank 0 owes this rank, which has failed, an answer."""
        self._shared = shared
        self._send = send
        self._recorder = recorder
        recorder.forward = self.record_others
        self._on_hang = on_hang
        self._thread = threading.get_ident()
        self._process = identify_process(os.getpid())
        self._others = {other: RankState() for other in others}
        self._key: tuple[int, int] | None = None
        self._stuck_seconds = 0.0
        self._next_report = intervals.WAIT_REPORT_DELAY
        self._over = threading.Event()

    def run(self) -> None:
        """Give heartbeats, and judge."""
        while not self._over.wait(intervals.HEARTBEAT_INTERVAL):
            for seen in list(self._others.values()):
                seen.silent_seconds += intervals.HEARTBEAT_INTERVAL
            own = self.make_heartbeat()
            if self.rank == 0 or self._others[0].runs:  # one that is stopped takes in nothing
                self._send({"seen": asdict(own)})
            if self.rank != 0 and self._others[0].runs:
                continue
            seen_by_rank = dict(sorted({**self._others, self.rank: RankState(own)}.items()))
            self._report(seen_by_rank)
            hang = self._find_hang(seen_by_rank)
            if hang is not None:
                self._on_hang(*hang)
                return

    def stop(self) -> None:
        """End the heartbeats."""
        self._over.set()
        self._recorder.forward = do_nothing

    def receive(self, rank: int, heartbeat: dict[str, Any]) -> None:
        """Take in another rank's heartbeat."""
        if rank in self._others:
            self._others[rank] = RankState(Heartbeat(**heartbeat))

    def remove(self, rank: int) -> None:
        """Judge a rank that has ended well no more."""
        self._others.pop(rank, None)

    def find_silent(self) -> dict[int, Heartbeat]:
        """Return the ranks that were seen and do not run any more, by where they were."""
        found = dict(self._others)
        return {rank: seen.heartbeat for rank, seen in found.items() if seen.heartbeat is not None and not seen.runs}

    def kill_silent(self, among: Container[int]) -> None:
        """Kill those ``among`` the ranks that do not run: they neither clean up nor end by themselves."""
        for rank, heartbeat in self.find_silent().items():
            if rank in among:
                kill_process(heartbeat.process)
                self._send({"kill": heartbeat.process})

    def record_others(self, reason: str) -> None:
        """Have the other ranks record their stacks."""
        if 0 not in self.find_silent():
            self._send({"stacks": reason})
        self.record_silent(reason)

    def record_silent(self, reason: str) -> None:
        """Record where ranks that do not run were last seen, which one rank does for all."""
        for rank, heartbeat in self.find_silent().items() if self.rank <= 1 else ():
            text = f"It does not run. Its main thread was last seen {heartbeat.where}:\n{heartbeat.stack}"
            self._recorder.append(reason, text, name=f"rank {rank}, seen from rank {self.rank}")

    def make_heartbeat(self) -> Heartbeat:
        """Return where this rank is now."""
        position = find_position(self._thread)
        key = (self._shared.num_barriers, position.key)
        self._stuck_seconds = self._stuck_seconds + intervals.HEARTBEAT_INTERVAL if key == self._key else 0.0
        self._key = key
        name = self._shared.waits_at
        if name is not None:
            return Heartbeat(f"at barrier '{name}'", "barrier", self._stuck_seconds, position.stack, self._process)
        where = f"in a collective, {position.where}" if position.is_in_collective else position.where
        waits_in: Literal["", "collective"] = "collective" if position.is_in_collective else ""
        return Heartbeat(where, waits_in, self._stuck_seconds, position.stack, self._process)

    def _report(self, seen: Mapping[int, RankState]) -> None:
        """Say now and then for whom ranks wait; of several that wait for rank 0, one does."""
        waiting, missing = find_missing(seen, intervals.WAIT_REPORT_DELAY)
        if not missing:
            self._next_report = intervals.WAIT_REPORT_DELAY
            return
        seconds = min(_stuck_seconds(seen[rank]) for rank in waiting)
        if seconds >= self._next_report and self.rank <= 1:
            self._next_report = 2 * seconds
            log.warning("Waiting: %s", describe_wait(waiting, missing, seen))

    def _find_hang(self, seen: Mapping[int, RankState]) -> tuple[int, str] | None:
        """Return a rank that hangs, and the reason, if the run must end for it; barriers have their own deadlines."""
        if self.needs_answer and self.rank != 0:
            return 0, f"hangs: it {seen[0].describe()}"
        seconds = barrier_timeout() + intervals.HANG_GRACE
        outside = {
            rank: replace(one, heartbeat=replace(one.heartbeat, stuck_seconds=0.0))
            if one.heartbeat is not None and one.heartbeat.waits_in == "barrier"
            else one
            for rank, one in seen.items()
        }
        waiting, missing = find_missing(outside, seconds)
        if not is_known(waiting, missing, seen):
            return None
        return missing[0], f"hangs: {describe_wait(waiting, missing, seen)}"


def find_missing(seen: Mapping[int, RankState], seconds: float) -> tuple[list[int], list[int]]:
    """Return the ranks that have not moved for so long because they wait for others, and those others.

    A rank waits if it is at a barrier or in a collective, as far as that shows; any rank that does not move may if
    another one has not run for as long, or if no rank moves and they are at different places (:func:`is_known`).

    Args:
        seen: what is known of each rank.
        seconds: without a move.
    """
    running = {rank: one.heartbeat for rank, one in seen.items() if one.runs and one.heartbeat is not None}
    stuck = [rank for rank, heartbeat in running.items() if heartbeat.stuck_seconds >= seconds]
    waiting = [rank for rank in stuck if running[rank].waits_in]
    silent = [rank for rank, one in seen.items() if not one.runs and (waiting or one.silent_seconds >= seconds)]
    if stuck and silent:
        return waiting or stuck, silent
    if not stuck or not (waiting or len(stuck) == len(seen)):
        return [], []
    waiting = waiting or [rank for rank in stuck if running[rank].where == running[stuck[0]].where]
    elsewhere = [rank for rank in running if running[rank].where != running[waiting[0]].where]
    missing = [rank for rank in elsewhere if not running[rank].waits_in] or [r for r in elsewhere if r in stuck]
    return (waiting, missing) if missing else ([], [])


def is_known(waiting: Sequence[int], missing: Sequence[int], seen: Mapping[int, RankState]) -> bool:
    """Return whether the run may end for what :func:`find_missing` has found.

    Ranks that run, and of which none is seen to wait for another, may each wait for something of their own, such as an
    engine or a reward.

    Args:
        waiting: as of :func:`find_missing`.
        missing: as of :func:`find_missing`.
        seen: what is known of each rank.
    """
    return any(not seen[rank].runs for rank in missing) or (bool(missing) and _shows_wait(waiting, seen))


def _shows_wait(waiting: Sequence[int], seen: Mapping[int, RankState]) -> bool:
    heartbeats = [seen[rank].heartbeat for rank in waiting]
    return any(heartbeat is not None and heartbeat.waits_in for heartbeat in heartbeats)


def describe_wait(waiting: Sequence[int], missing: Sequence[int], seen: Mapping[int, RankState]) -> str:
    """Return a sentence on who waits where, for whom, and where those are.

    Args:
        waiting: as of :func:`find_missing`.
        missing: as of :func:`find_missing`.
        seen: what is known of each rank.
    """
    first = seen[waiting[0]].heartbeat
    assert first is not None
    seconds = min(_stuck_seconds(seen[rank]) for rank in waiting)
    places = "; ".join(f"rank {rank} {seen[rank].describe()}" for rank in missing)
    verb = f"{'have' if len(waiting) > 1 else 'has'} {'waited' if _shows_wait(waiting, seen) else 'been'}"
    link = "" if _shows_wait(waiting, seen) else ", perhaps waiting"
    return f"{name_ranks(waiting)} {verb} {seconds:.0f} s {first.where}{link} for {name_ranks(missing)}: {places}."


def _stuck_seconds(seen: RankState) -> float:
    return 0.0 if seen.heartbeat is None else seen.heartbeat.stuck_seconds
