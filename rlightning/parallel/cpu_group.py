"""What the processes of a run share beside their devices: a gloo group over all ranks, and a store of short notes.

A collective on a device's group waits behind everything that is queued there; those that steer the run go through the
CPU.
"""

import copy
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch.distributed as dist

from rlightning import intervals
from rlightning.errors import RunError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")


class StoreError(RunError, RuntimeError):
    """The store does not answer: the process that hosts it has ended, or cannot be reached."""


class StoreSilentError(StoreError):
    """The store gives no answer, but its connection stands: its host may be stopped, and go on."""


class NoteStore:
    """Short texts by key that every rank can read, with an end to each wait.

    The process group's own store can wait for ever when its host is stopped or cut off, and nothing interrupts it: so
    a thread of this process does the asking.

    Args:
        store: the process group's; this one uses a connection of its own to it.
        prefix: of all keys.
    """

    def __init__(self, store: "Store", prefix: str) -> None:
        self._prefix = prefix
        self._deadline = float("inf")
        self._tasks: queue.SimpleQueue[tuple[Callable[[Store], Any], queue.SimpleQueue[Any]] | None]
        self._tasks = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, args=(store,), name="note-store", daemon=True)
        self._thread.start()

    def set(self, key: str, text: str) -> None:
        """Write ``text``."""
        self._ask(lambda store: store.set(self._prefix + key, text))

    def get(self, key: str) -> str | None:
        """What is written there, or None."""

        def read(store: "Store") -> str | None:
            # A key that is not there would be waited for.
            return store.get(self._prefix + key).decode() if store.check([self._prefix + key]) else None

        return self._ask(read)

    def settle(self, key: str, text: str) -> str:
        """Write ``text`` unless something is there already; what is there then, the same on all ranks."""
        return self._ask(lambda store: store.compare_set(self._prefix + key, "", text)).decode()

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that begins at 0; its new value."""
        return self._ask(lambda store: store.add(self._prefix + key, amount))

    def until(self, deadline: float) -> Self:
        """The same notes, for somebody who does not wait for an answer until after ``deadline``.

        Args:
            deadline: of ``time.monotonic()``; each answer gets ``intervals.MIN_STORE_TIMEOUT`` nevertheless.
        """
        notes = copy.copy(self)
        notes._deadline = deadline
        return notes

    def close(self) -> None:
        """End the connection; on rank 0 it keeps the store itself alive, and its port taken."""
        self._tasks.put(None)
        self._thread.join(1.0)

    def _ask(self, task: Callable[["Store"], T]) -> T:
        answers: queue.SimpleQueue[tuple[T, None] | tuple[None, RuntimeError]] = queue.SimpleQueue()
        self._tasks.put((task, answers))
        seconds = min(intervals.STORE_TIMEOUT, max(intervals.MIN_STORE_TIMEOUT, self._deadline - time.monotonic()))
        try:
            answer, error = answers.get(timeout=seconds)
        except queue.Empty:
            raise StoreSilentError(f"The ranks' store gave no answer in {seconds:.0f} s.") from None
        if error is not None:
            raise StoreError("The ranks' store does not answer.") from error
        return answer  # type: ignore[return-value]

    def _serve(self, store: Any) -> None:
        own: Any = None
        while (asked := self._tasks.get()) is not None:
            task, answers = asked
            try:
                if own is None:
                    own = store.clone()
                    own.set_timeout(timedelta(seconds=intervals.STORE_TIMEOUT))
                answers.put((task(own), None))
            except RuntimeError as error:
                answers.put((None, error))


@dataclass
class Connection:
    """What belongs to one default process group.

    Attributes:
        notes: the ranks' store.
        group: the gloo group, once it is there.
        num_barriers: how many this rank has come to.
        waits_at: the name of the barrier that it waits at.
    """

    notes: NoteStore
    group: dist.ProcessGroup | None = None
    num_barriers: int = 0
    waits_at: str | None = None

    @contextmanager
    def waiting_at(self, name: str) -> Iterator[None]:
        """Within, this rank waits for the others at barrier ``name``."""
        self.waits_at = name
        try:
            yield
        finally:
            self.waits_at = None


_connections: weakref.WeakKeyDictionary[dist.ProcessGroup, Connection] = weakref.WeakKeyDictionary()
_left: list[Connection] = []
"""Whose groups may be in the middle of a collective, so that their end would be waited for."""
_num_connections = 0
DEFAULT_BARRIER_TIMEOUT = 1800.0
"""Seconds."""
_timeout_seconds = DEFAULT_BARRIER_TIMEOUT


def set_barrier_timeout(seconds: float) -> None:
    """Set how long barriers wait that name no timeout; 1800 s unless set. The same on all ranks, please."""
    global _timeout_seconds
    _timeout_seconds = seconds


def barrier_timeout() -> float:
    """How long barriers wait that name no timeout, in seconds."""
    return _timeout_seconds


def connection() -> Connection | None:
    """The ranks' connection, or None in a process that is alone."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    world = dist.group.WORLD
    assert world is not None
    if world not in _connections:
        _connections[world] = _connect(world)
    return _connections[world]


def renew_connection() -> None:
    """Begin another connection, with a group of its own, where all ranks have left what they met for on the first."""
    world = dist.group.WORLD
    assert world is not None
    if (left := _connections.get(world)) is not None:
        _left.append(left)
    _connections[world] = _connect(world)


def _connect(world: dist.ProcessGroup) -> Connection:
    global _num_connections
    # A store can outlive its process group: torchrun keeps one for all groups that a process begins.
    _num_connections += 1
    notes = NoteStore(dist.distributed_c10d._get_default_store(), f"rlightning/{_num_connections}/")
    weakref.finalize(world, notes.close)
    return Connection(notes)


def cpu_group() -> dist.ProcessGroup | None:
    """The gloo group over all ranks, or None in a process that is alone.

    The first call makes it, and is a collective: all ranks have to come to it.
    """
    shared = connection()
    if shared is None:
        return None
    if shared.group is None:
        shared.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_timeout_seconds))
    return shared.group


def leave_groups() -> None:
    """Leave all process groups, once every rank is through, while Python still stands.

    A thread of gloo's that lets go of its last tensor when the interpreter is gone aborts the process
    (https://github.com/pytorch/pytorch/issues/190489).
    """
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
