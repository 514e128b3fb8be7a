"""The tensors that a process stores for other processes: the store, its statistics, and the policy on what to store.

A stored object, a :class:`Block`, contains the bytes of one or several tensors. It exists as long as any process has a
reference to it; the store itself counts objects and keeps no reference. Handles to tensors are in
:mod:`~rlightning.controller.rtensor`, blocks on Ray in :mod:`~rlightning.controller.object_store`.
"""

import functools
import itertools
import os
import pickle
import socket
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from time import sleep
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from rlightning.errors import RunError, check_rules
from rlightning.parallel.collectives import global_rank
from rlightning.processes.liveness import Deadline

Bytes = NDArray[np.uint8]
"""A tensor's elements as raw bytes: [nbytes]."""


class StoreFullError(RunError, RuntimeError):
    """Storing would exceed the process's limit; the message lists the stored objects."""


class TensorLostError(RunError, RuntimeError):
    """A handle's tensor no longer exists, because the process that stored it has ended."""


class Owner(NamedTuple):
    """The process that stored a tensor.

    Attributes:
        rank: its global rank; 0 without a process group.
    """

    rank: int
    host: str
    pid: int

    @classmethod
    def of_this_process(cls) -> Self:
        """Return this process's rank, host and process id."""
        return cls(global_rank(), socket.gethostname(), os.getpid())

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


class LabelUsage(NamedTuple):
    """Number of stored objects with the same ``label``, such as a hook's name, and their total size in bytes."""

    label: str
    entries: int
    nbytes: int


class Block(ABC):
    """Reference to one object of a TensorStore: bytes of tensors, which exist as long as any process references it."""

    def __init__(self, owner: Owner, label: str) -> None:
        self.owner = owner
        self.label = label

    @classmethod
    @abstractmethod
    def read_all(cls, blocks: Sequence[Self]) -> list[Sequence[Bytes]]:
        """Return the bytes of each block's tensors, which must not be modified; all blocks are fetched at once."""

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # stored tensors never change


class TensorStore(ABC):
    """Keeps the bytes of tensors to which this process creates handles, as long as any process references them.

    Args:
        max_bytes: maximum bytes of all stored objects at a time; None for no limit.
    """

    full_timeout = 0.0
    """Seconds for which a full store waits for handles to be released before it raises an error."""

    def __init__(self, *, max_bytes: int | None = None) -> None:
        is_positive = max_bytes is None or max_bytes > 0
        check_rules({f"max_bytes={max_bytes} must be positive. Leave it out for no limit": is_positive})
        self.max_bytes = max_bytes
        # Entries are removed by the thread that releases the last handle, in one operation each, without a lock.
        self._alive: dict[int, tuple[str, int]] = {}
        self._keys = itertools.count()

    @abstractmethod
    def _store(self, arrays: Sequence[Bytes], owner: Owner, label: str, forget: Callable[[], object]) -> Block:
        """Store copies of ``arrays``; ``forget`` is called when no process has a reference to the block any more."""

    def put(self, arrays: Sequence[Bytes], *, label: str) -> Block:
        """Store copies of the arrays, each a tensor's bytes, as one object, and return a reference to it.

        ``label`` is for :meth:`usage_by_label`. A full store first waits up to ``full_timeout`` seconds for objects to
        be released.

        Raises:
            StoreFullError: if the limit would be exceeded; nothing is stored then.
        """
        nbytes = sum(array.nbytes for array in arrays)
        self._make_room(nbytes, label)
        key = next(self._keys)
        block = self._store(arrays, Owner.of_this_process(), label, functools.partial(self._alive.pop, key, None))
        self._alive[key] = (label, nbytes)
        return block

    def live_entries(self) -> int:
        """Return the number of stored objects with references in any process."""
        return len(self._alive)

    def live_bytes(self) -> int:
        """Return the bytes of stored objects with references in any process."""
        return sum(nbytes for _, nbytes in self._alive.copy().values())

    def usage_by_label(self) -> list[LabelUsage]:
        """Return the number and size of the existing objects of each label, the largest total first."""
        by_label: dict[str, list[int]] = defaultdict(list)
        for label, nbytes in self._alive.copy().values():
            by_label[label].append(nbytes)
        found = [LabelUsage(label, len(sizes), sum(sizes)) for label, sizes in by_label.items()]
        return sorted(found, key=lambda usage: usage.nbytes, reverse=True)

    def _make_room(self, nbytes: int, label: str) -> None:
        if self.max_bytes is None:
            return
        deadline = Deadline(self.full_timeout)
        while self.live_bytes() + nbytes > self.max_bytes:
            if deadline.is_over or nbytes > self.max_bytes:
                held = "; ".join(f"'{h.label}': {h.entries} x, {h.nbytes:,} bytes" for h in self.usage_by_label())
                raise StoreFullError(
                    f"'{label}' would store {nbytes:,} bytes more than the {self.live_bytes():,} that are alive in the "
                    f"tensor store of {Owner.of_this_process()}, over its max_bytes={self.max_bytes:,}. "
                    f"Held are: {held or 'nothing'}. Drop handles sooner, or raise max_bytes."
                )
            sleep(0.005)


class LocalBlock(Block):
    """Reference to tensors' bytes in this process's memory; it cannot be sent to another process."""

    def __init__(self, arrays: Sequence[Bytes], owner: Owner, label: str) -> None:
        super().__init__(owner, label)
        self._arrays = arrays

    @classmethod
    def read_all(cls, blocks: Sequence[Self]) -> list[Sequence[Bytes]]:
        """Return the bytes of each block's tensors, without a copy."""
        return [block._arrays for block in blocks]

    def __reduce__(self) -> tuple[object, ...]:
        raise pickle.PicklingError(
            f"A handle to what '{self.label}' stored in its own process cannot be sent to another one. "
            "Fetch it first, or store on Ray: set_store(RayStore())."
        )


class LocalStore(TensorStore):
    """Stores tensors in this process's memory, only for this process; the default without Ray."""

    def _store(self, arrays: Sequence[Bytes], owner: Owner, label: str, forget: Callable[[], object]) -> Block:
        block = LocalBlock([array.copy() for array in arrays], owner, label)
        weakref.finalize(block, forget).atexit = False
        return block


_store: TensorStore = LocalStore()
_stores_results = True


def tensor_store() -> TensorStore:
    """Return the store of this process: a :class:`LocalStore`, unless :func:`set_store` has set another."""
    return _store


def set_store(store: TensorStore) -> None:
    """Set the store to which this process saves tensors from now on; old handles stay valid, but are not counted."""
    global _store
    _store = store


def live_entries() -> int:
    """Return the number of objects that this process stored and that any process references."""
    return _store.live_entries()


def live_bytes() -> int:
    """Return the bytes of objects that this process stored and that any process references."""
    return _store.live_bytes()


def stores_results() -> bool:
    """Return whether this rank is the one of its tensor-parallel group that stores the results equal on all of them.

    True unless ``RemotizeOnHeadOnly`` has called :func:`set_stores_results` for its run.
    """
    return _stores_results


def set_stores_results(is_storing: bool) -> None:
    """Set the return value of :func:`stores_results`."""
    global _stores_results
    _stores_results = is_storing
