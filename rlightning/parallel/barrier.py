"""The one barrier: it has a name and a timeout, and its error says who did not come.

Every rank notes in the store where it is before it meets the others in an all-reduce on the CPU group. When the meeting
fails, the notes tell who is missing; the first rank to write the verdict decides it for all.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from rlightning import intervals
from rlightning.errors import RunError
from rlightning.parallel.cpu_group import (
    Connection,
    StoreError,
    StoreSilentError,
    barrier_timeout,
    connection,
    cpu_group,
)
from rlightning.parallel.device import synchronize
from rlightning.parallel.stacks import record_all

_hooks: list[Callable[[], None]] = []


class BarrierError(RunError, RuntimeError):
    """A barrier was not reached by all ranks; the message is the same on every rank.

    Attributes:
        missing_ranks: those that did not arrive, or went while the others waited.
    """

    def __init__(self, message: str, missing_ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.missing_ranks = tuple(missing_ranks)


def add_barrier_hook(hook: Callable[[], None]) -> None:
    """Have ``hook()`` called at every barrier, before this rank meets the others."""
    _hooks.append(hook)


def remove_barrier_hook(hook: Callable[[], None]) -> None:
    """Undo :func:`add_barrier_hook`."""
    _hooks.remove(hook)


def barrier(name: str, *, timeout: float | None = None, device: torch.device | None = None) -> None:
    """Wait until all ranks are here.

    A process that is alone, or without ``torch.distributed``, does not wait; the device and the hooks have their turn.

    Args:
        name: what errors call it. Ranks that meet at different names get an error, not a pass.
        timeout: seconds; ``set_barrier_timeout``'s, unless given.
        device: one whose queued work is finished first.

    Raises:
        BarrierError: not all ranks came within the timeout, or one of them went away.
    """
    if device is not None:
        synchronize(device)
    for hook in tuple(_hooks):
        hook()
    shared = connection()
    if shared is not None:
        shared.num_barriers += 1
        with shared.waiting_at(name):
            _Meeting(name, barrier_timeout() if timeout is None else timeout, shared).hold()


@dataclass
class _Place:
    """Where a rank was seen: at its ``number``-th barrier, ``name``, at ``time`` (seconds, the rank's own clock)."""

    number: int
    name: str
    time: float


@dataclass
class _Verdict:
    """What all ranks are told, and whom it names."""

    message: str
    missing: list[int]


class _Meeting:
    """One barrier on one rank."""

    def __init__(self, name: str, seconds: float, shared: Connection) -> None:
        self.name = name
        self.seconds = seconds
        self.number = shared.num_barriers
        self.has_group = shared.group is not None
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.deadline = time.monotonic() + seconds
        self.notes = shared.notes.until(self.deadline)

    def hold(self) -> None:
        """Meet the others or raise."""
        try:
            self.notes.set(f"place/{self.rank}", json.dumps(asdict(_Place(self.number, self.name, time.time()))))
            # The others may have given up already, and their half of the all-reduce would still answer.
            self._heed_verdict()
            if not self.has_group:
                self._gather_at_store()
        except StoreError as error:
            if not self.has_group or self._is_lost(error):
                raise self._lost_store() from error
        digest = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:7])
        extremes = torch.tensor([digest, -digest])
        self._await(_start_max(extremes, self.seconds))
        if extremes[0] != -extremes[1]:
            self._fail(self._different_names)

    def _gather_at_store(self) -> None:
        """Wait for all ranks before the CPU group is made: that has no name, and its own long timeout."""
        self.notes.add("arrived", 1)
        while self.notes.add("arrived", 0) < self.world_size:
            self._heed_verdict()
            if time.monotonic() > self.deadline:
                self._fail(self._not_reached)
            time.sleep(intervals.SHORT_POLL_INTERVAL)

    def _await(self, work: dist.Work) -> None:
        while not _ends_within(work, intervals.POLL_INTERVAL):
            try:
                self._heed_verdict()
                if self.notes.get("roll_call"):
                    self._fail(self._broken)
                if time.monotonic() > self.deadline and not self._is_all_but_done(work):
                    self._fail(self._not_reached)
            except StoreError as error:
                if self._is_lost(error):
                    raise self._lost_store() from error
        try:
            work.wait()
        except RuntimeError:
            # After a stall of this process it may be at its own end of time, which is later than the deadline.
            self._fail(self._not_reached if time.monotonic() > self.deadline else self._broken)

    def _is_all_but_done(self, work: dist.Work) -> bool:
        """Whether the last rank came just now, and the meeting ends well after all."""
        return not self._missing(self._places()) and _ends_within(work, intervals.ARRIVALS_GRACE)

    def _is_lost(self, error: StoreError) -> bool:
        """Whether the store is gone for good; while its host may only be stopped, this rank waits as for any other."""
        return not isinstance(error, StoreSilentError) or time.monotonic() > self.deadline

    def _heed_verdict(self) -> None:
        """Raise what the ranks have agreed on, if they have."""
        if (text := self.notes.get("verdict")) is not None:
            self._announce(text)

    def _fail(self, judge: Callable[[], _Verdict]) -> NoReturn:
        """Agree with the others on what went wrong, and raise it."""
        try:
            self._announce(self.notes.settle("verdict", json.dumps(asdict(judge()))))
        except StoreError as error:
            raise self._lost_store() from error

    def _announce(self, text: str) -> NoReturn:
        verdict = _Verdict(**json.loads(text))
        num_readers = self.notes.add("read", 1)
        # The store may be in this process, and goes with it: the others read the verdict first.
        leave = time.monotonic() + intervals.ARRIVALS_GRACE
        while self.rank == 0 and num_readers < self.world_size - len(verdict.missing) and time.monotonic() < leave:
            time.sleep(intervals.SHORT_POLL_INTERVAL)
            num_readers = self.notes.add("read", 0)
        raise BarrierError(verdict.message, verdict.missing)

    def _not_reached(self) -> _Verdict:
        places = self._places()
        missing = self._missing(places)
        if not missing:
            return self._broken()
        if self.notes.add("stacks", 1) == 1:
            record_all(f"{name_ranks(missing)} did not reach barrier '{self.name}'")
        rule = f"Barrier '{self.name}' was not reached by {name_ranks(missing)} within {self.seconds:g} s"
        return _Verdict(f"{rule}: {self._whereabouts(missing, places)}.", missing)

    def _broken(self) -> _Verdict:
        """A connection closed: those at this barrier who do not answer a call are gone, too."""
        self.notes.set("roll_call", "1")
        self.notes.set(f"present/{self.rank}", "1")
        end = time.monotonic() + intervals.ARRIVALS_GRACE
        absent = self._absent()
        while absent and not self._failures(absent) and time.monotonic() < end:
            self._heed_verdict()
            time.sleep(intervals.SHORT_POLL_INTERVAL)
            absent = self._absent()
        rule = f"Barrier '{self.name}' broke: a connection between the ranks closed"
        if not absent:
            return _Verdict(f"{rule}, though all ranks are still there.", [])
        return _Verdict(f"{rule}; {self._whereabouts(absent, self._places())}.", absent)

    def _different_names(self) -> _Verdict:
        places = self._places()
        names = sorted({place.name for place in places.values()})
        groups = [(name_ranks([r for r, place in places.items() if place.name == name]), name) for name in names]
        at = "; ".join(f"{ranks} at '{name}'" for ranks, name in groups)
        return _Verdict(f"The ranks met at different barriers: {at}. They must come to the same ones in one order.", [])

    def _lost_store(self) -> BarrierError:
        if time.monotonic() > self.deadline:
            record_all(f"the ranks' store does not answer at barrier '{self.name}'")
        # Which process hosts it, the ranks cannot ask any more: without torchrun it is that of rank 0.
        return BarrierError(
            f"Barrier '{self.name}' broke: the ranks' store does not answer. Rank 0, which hosts it (torchrun, where "
            "that launched the ranks), has ended or cannot be reached.",
            [0],
        )

    def _places(self) -> dict[int, _Place]:
        texts = {rank: self.notes.get(f"place/{rank}") for rank in range(self.world_size)}
        return {rank: _Place(**json.loads(text)) for rank, text in texts.items() if text is not None}

    def _missing(self, places: dict[int, _Place]) -> list[int]:
        """The ranks that have not come here."""
        return [rank for rank in range(self.world_size) if rank not in places or places[rank].number < self.number]

    def _absent(self) -> list[int]:
        """The ranks that do not answer the roll call."""
        return [rank for rank in range(self.world_size) if self.notes.get(f"present/{rank}") is None]

    def _failures(self, ranks: Iterable[int]) -> dict[int, str]:
        """What the failure watch has noted of the ranks."""
        notes = {rank: self.notes.get(f"failed/{rank}") for rank in ranks}
        return {rank: text for rank, text in notes.items() if text is not None}

    def _whereabouts(self, missing: list[int], places: dict[int, _Place]) -> str:
        failures = self._failures(missing)
        return "; ".join(f"rank {rank} {failures.get(rank) or self._last_seen(places.get(rank))}" for rank in missing)

    def _last_seen(self, place: _Place | None) -> str:
        if place is None:
            return "has reached no barrier yet"
        if place.number == self.number:
            return "was there, but does not answer any more"
        return _seen_at(place)


def roll_call(is_over: Callable[[], bool]) -> str:
    """What is known of the ranks that do not come here too; for all whom a collective has failed on.

    Args:
        is_over: asked now and then, ends the waiting for others: there is another reason.

    Returns:
        Such as "rank 1 was last seen at barrier 'next batch', 6 s ago"; nothing if all ranks are here.
    """
    shared = connection()
    if shared is None:
        return ""
    notes, ranks = shared.notes.until(time.monotonic()), range(dist.get_world_size())
    try:
        notes.set(f"in_roll_call/{dist.get_rank()}", "1")
        end = time.monotonic() + intervals.ARRIVALS_GRACE
        silent = list(ranks)
        while silent and not is_over() and time.monotonic() < end:
            time.sleep(intervals.SHORT_POLL_INTERVAL)
            silent = [rank for rank in silent if notes.get(f"in_roll_call/{rank}") is None]
        if is_over():
            return ""
        places = {rank: notes.get(f"place/{rank}") for rank in silent}
    except StoreError:
        return "the ranks' store does not answer, which rank 0 hosts (torchrun, where that launched the ranks)"
    return "; ".join(
        f"rank {rank} " + (_seen_at(_Place(**json.loads(text))) if text else "has reached no barrier yet")
        for rank, text in places.items()
    )


def _seen_at(place: _Place) -> str:
    return f"was last seen at barrier '{place.name}', {max(0.0, time.time() - place.time):.0f} s ago"


def note_failure(rank: int, text: str) -> None:
    """Let errors of barriers say of ``rank`` that it "failed: ValueError: ...", or what ``text`` has to say."""
    shared = connection()
    if shared is not None:
        with contextlib.suppress(StoreError):
            shared.notes.set(f"failed/{rank}", text)


def _start_max(tensor: torch.Tensor, seconds: float) -> dist.Work:
    """Begin to take the largest of ``tensor`` over all ranks."""
    group = cpu_group()
    assert group is not None
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    # The deadline is ours; that of the operation has to be later, and soon: a process ends after its operations.
    options.timeout = timedelta(seconds=seconds + intervals.ARRIVALS_GRACE)
    return group.allreduce([tensor], options)


def _ends_within(work: dist.Work, seconds: float) -> bool:
    """Whether ``work`` has ended, well or not; waits for it up to ``seconds``."""
    with contextlib.suppress(RuntimeError):  # raised at the end of the time, too
        work.wait(timedelta(seconds=seconds))
    return work.is_completed()


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
