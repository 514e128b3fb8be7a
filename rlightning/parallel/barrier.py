"""The barrier of all ranks: it has a name and a timeout, and its error names the ranks that did not reach it.

Every rank writes to the store which barrier it has reached, before an all-reduce on the CPU group. If that fails, the
entries show which ranks are missing; the first diagnosis that a rank writes becomes the error of all ranks.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from rlightning import intervals
from rlightning.errors import RunError
from rlightning.parallel.cpu_group import Connection, barrier_timeout, connection, cpu_group
from rlightning.parallel.device import synchronize
from rlightning.parallel.rank_store import StoreError, StoreSilentError
from rlightning.parallel.stacks import record_all
from rlightning.processes.liveness import Deadline

_hooks: list[Callable[[], None]] = []
ARRIVAL, FAILURE = "arrival", "failure"
"""Keys of the store: the last barrier that a rank has reached, as JSON; the failure watch's text about a rank."""


class BarrierError(RunError, RuntimeError):
    """A barrier was not reached by all ranks; the message is the same on every rank.

    Attributes:
        missing_ranks: ranks that did not arrive, or disconnected while the others waited.
    """

    def __init__(self, message: str, missing_ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.missing_ranks = tuple(missing_ranks)


def add_barrier_hook(hook: Callable[[], None]) -> None:
    """Register a function that this rank calls at every barrier, before it waits for the others."""
    _hooks.append(hook)


def remove_barrier_hook(hook: Callable[[], None]) -> None:
    """Undo :func:`add_barrier_hook`."""
    _hooks.remove(hook)


def barrier(name: str, *, timeout: float | None = None, device: torch.device | None = None) -> None:
    """Wait until all ranks have called this with the same name; raise a BarrierError if some do not.

    A single process, or one without ``torch.distributed``, does not wait, but synchronizes the device and calls hooks.

    Args:
        name: name of the barrier, for errors. Ranks that wait at barriers of different names get an error.
        timeout: seconds; None for the default of ``set_barrier_timeout``.
        device: device that is synchronized first; None for no device.

    Raises:
        BarrierError: not all ranks arrived within the timeout, or one of them disconnected.
    """
    if device is not None:
        synchronize(device)
    for hook in tuple(_hooks):
        hook()
    shared = connection()
    if shared is not None:
        shared.num_barriers += 1
        with shared.waiting_at(name):
            _Barrier(name, barrier_timeout() if timeout is None else timeout, shared).wait()


class _Arrival(NamedTuple):
    """A rank's arrival at its ``number``-th barrier, ``name``, at ``time`` (seconds, the rank's own clock)."""

    number: int
    name: str
    time: float

    def describe(self) -> str:
        return f"was last seen at barrier '{self.name}', {max(0.0, time.time() - self.time):.0f} s ago"


class _Diagnosis(NamedTuple):
    """The text of the error, equal on all ranks, and the ranks that it names as missing."""

    message: str
    missing: list[int]


class _Barrier:
    """The state of one barrier on one rank."""

    def __init__(self, name: str, seconds: float, shared: Connection) -> None:
        self.name, self.seconds = name, seconds
        self.number = shared.num_barriers
        self.has_group = shared.group is not None
        self.deadline = Deadline(seconds)
        self.store = shared.store.until(self.deadline)

    def wait(self) -> None:
        """Wait for the other ranks, or raise a BarrierError."""
        try:
            arrival = _Arrival(self.number, self.name, time.time())
            self.store.set(f"{ARRIVAL}/{self.store.rank}", json.dumps(arrival))
            # Other ranks may have failed already, and their part of the all-reduce could still succeed.
            self._raise_decided()
            if not self.has_group:
                self._wait_at_store()
        except StoreError as error:
            if not self.has_group or self._is_lost(error):
                raise self._lost_store() from error
        digest = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:7])
        extremes = torch.tensor([digest, -digest])
        self._await(_start_max(extremes, self.seconds))
        if extremes[0] != -extremes[1]:
            self._fail(self._different_names)

    def _wait_at_store(self) -> None:
        """Wait for all ranks before the CPU group is created, since its creation has no name and a long timeout."""
        self.store.add("num_arrived", 1)
        while self.store.add("num_arrived", 0) < len(self.store.ranks):
            self._raise_decided()
            if self.deadline.is_over:
                self._fail(self._not_reached)
            time.sleep(intervals.SHORT_POLL_INTERVAL)

    def _await(self, work: dist.Work) -> None:
        while not _ends_within(work, intervals.POLL_INTERVAL):
            try:
                self._raise_decided()
                if self.store.get("is_broken"):
                    self._fail(self._diagnose_disconnect)
                if self.deadline.is_over and not self._ends_late(work):
                    self._fail(self._not_reached)
            except StoreError as error:
                if self._is_lost(error):
                    raise self._lost_store() from error
        try:
            work.wait()
        except RuntimeError:
            # After this process was stalled, the operation may have timed out, which is later than the deadline.
            self._fail(self._not_reached if self.deadline.is_over else self._diagnose_disconnect)

    def _ends_late(self, work: dist.Work) -> bool:
        """Return whether the last rank arrived just after the deadline, so that the barrier succeeds after all."""
        return not self._missing(self._arrivals()) and _ends_within(work, intervals.BARRIER_REPORT_GRACE)

    def _is_lost(self, error: StoreError) -> bool:
        """Return whether to treat the store as lost; before the deadline, the store's host may only be suspended."""
        return not isinstance(error, StoreSilentError) or self.deadline.is_over

    def _raise_decided(self) -> None:
        """Raise a BarrierError with the ranks' common diagnosis if one has been stored."""
        if (text := self.store.get("diagnosis")) is not None:
            self._raise(text)

    def _fail(self, diagnose: Callable[[], _Diagnosis]) -> NoReturn:
        """Store this rank's diagnosis for all ranks, unless another rank was first; raise the stored diagnosis."""
        try:
            self._raise(self.store.set_first("diagnosis", json.dumps(diagnose())))
        except StoreError as error:
            raise self._lost_store() from error

    def _raise(self, text: str) -> NoReturn:
        diagnosis = _Diagnosis(*json.loads(text))
        self.store.add("num_readers", 1)
        if self.store.rank == 0:
            # The store may be in this process and end with it: other ranks must read the diagnosis before.
            num_present = len(self.store.ranks) - len(diagnosis.missing)
            deadline = Deadline(intervals.BARRIER_REPORT_GRACE)
            deadline.wait_until(lambda: self.store.add("num_readers", 0) >= num_present)
        raise BarrierError(*diagnosis)

    def _not_reached(self) -> _Diagnosis:
        arrivals = self._arrivals()
        missing = self._missing(arrivals)
        if not missing:
            return self._diagnose_disconnect()
        if self.store.add("num_recorders", 1) == 1:
            record_all(f"{name_ranks(missing)} did not reach barrier '{self.name}'")
        rule = f"Barrier '{self.name}' was not reached by {name_ranks(missing)} within {self.seconds:g} s"
        return _Diagnosis(f"{rule}: {self._describe(missing, arrivals)}.", missing)

    def _diagnose_disconnect(self) -> _Diagnosis:
        """Return the diagnosis for a closed connection: ranks that do not answer count as disconnected."""
        self.store.set("is_broken", "1")

        def is_explained(missing: list[int]) -> bool:
            self._raise_decided()
            return bool(self.store.by_rank(FAILURE, missing))

        present = self.store.exchange("present", "1", intervals.BARRIER_REPORT_GRACE, is_over=is_explained)
        absent = [rank for rank in self.store.ranks if rank not in present]
        rule = f"Barrier '{self.name}' broke: a connection between the ranks closed"
        if not absent:
            return _Diagnosis(f"{rule}, though all ranks are still there.", [])
        return _Diagnosis(f"{rule}; {self._describe(absent, self._arrivals())}.", absent)

    def _different_names(self) -> _Diagnosis:
        arrivals = self._arrivals()
        names = sorted({arrival.name for arrival in arrivals.values()})
        groups = [(name_ranks([r for r, found in arrivals.items() if found.name == name]), name) for name in names]
        at = "; ".join(f"{ranks} at '{name}'" for ranks, name in groups)
        return _Diagnosis(
            f"The ranks met at different barriers: {at}. They must come to the same ones in one order.", []
        )

    def _lost_store(self) -> BarrierError:
        if self.deadline.is_over:
            record_all(f"the ranks' store does not answer at barrier '{self.name}'")
        # The ranks can no longer find out which process hosts it: without torchrun, rank 0.
        return BarrierError(
            f"Barrier '{self.name}' broke: the ranks' store does not answer. Rank 0, which hosts it (torchrun, where "
            "that launched the ranks), has ended or cannot be reached.",
            [0],
        )

    def _arrivals(self) -> dict[int, _Arrival]:
        return {rank: _Arrival(*json.loads(text)) for rank, text in self.store.by_rank(ARRIVAL).items()}

    def _missing(self, arrivals: dict[int, _Arrival]) -> list[int]:
        """Return the ranks that have not reached this barrier."""
        return [rank for rank in self.store.ranks if rank not in arrivals or arrivals[rank].number < self.number]

    def _describe(self, missing: list[int], arrivals: dict[int, _Arrival]) -> str:
        """Describe each missing rank: its failure, or its last reported location."""
        texts = {
            rank: "was there, but does not answer any more" if arrival.number == self.number else arrival.describe()
            for rank, arrival in arrivals.items()
        } | self.store.by_rank(FAILURE, missing)
        return describe_ranks(missing, texts)


def report_arrivals(is_over: Callable[[], bool]) -> str:
    """Report in the ranks' key-value store that a collective failed here, wait for the other ranks' reports, and
    describe the ranks without one.

    The ranks without this entry did not take part in the collective, and are probably the cause. The wait is at most
    ``intervals.BARRIER_REPORT_GRACE`` seconds.

    Args:
        is_over: polled; returns True to end the wait for other ranks, because another cause is known.

    Returns:
        A text such as "rank 1 was last seen at barrier 'next batch', 6 s ago"; "" if the collective failed on all
        ranks, or another cause is known, or there is a single process.
    """
    shared = connection()
    if shared is None:
        return ""
    store = shared.store.until(Deadline(0.0))
    try:
        failed = store.exchange(
            "in_failed_collective", "1", intervals.BARRIER_REPORT_GRACE, is_over=lambda missing: is_over()
        )
        missing = [rank for rank in store.ranks if rank not in failed]
        if is_over():
            return ""
        arrivals = store.by_rank(ARRIVAL, missing)
    except StoreError:
        return "the ranks' store does not answer, which rank 0 hosts (torchrun, where that launched the ranks)"
    texts = {rank: _Arrival(*json.loads(text)).describe() for rank, text in arrivals.items()}
    return describe_ranks(missing, texts)


def describe_ranks(ranks: Iterable[int], texts: Mapping[int, str]) -> str:
    """Return one line about missing ranks, such as "rank 1 failed: ...; rank 2 has reached no barrier yet".

    Args:
        ranks: the ranks to describe.
        texts: what is known of each rank, such as "failed: ValueError: boom".
    """
    return "; ".join(f"rank {rank} {texts.get(rank, 'has reached no barrier yet')}" for rank in ranks)


def write_failure(rank: int, text: str) -> None:
    """Write why a rank failed, such as "failed: ValueError: boom", to the ranks' key-value store, so that the errors of
    barriers on other ranks can quote it.
    """
    shared = connection()
    if shared is not None:
        with contextlib.suppress(StoreError):
            shared.store.set(f"{FAILURE}/{rank}", text)


def _start_max(tensor: torch.Tensor, seconds: float) -> dist.Work:
    """Start an all-reduce that takes the maximum of ``tensor`` over all ranks."""
    group = cpu_group()
    assert group is not None
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    # This function enforces the deadline. The operation's own is a little later, since a process waits for it at exit.
    options.timeout = timedelta(seconds=seconds + intervals.BARRIER_REPORT_GRACE)
    return group.allreduce([tensor], options)


def _ends_within(work: dist.Work, seconds: float) -> bool:
    """Return whether ``work`` ends, successfully or not, within ``seconds``."""
    with contextlib.suppress(RuntimeError):  # also raised at the timeout
        work.wait(timedelta(seconds=seconds))
    return work.is_completed()


def name_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks as words, such as "rank 1" or "ranks 0, 1 and 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
