"""The CPU communication of a run's processes: a gloo group over all ranks, and a key-value store.

A collective on a device waits for all work queued there. Hence collectives that control the run use the CPU.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from rlightning.parallel.rank_store import RankStore
from rlightning.torch_internals import default_store


@dataclass
class Connection:
    """This rank's means to communicate with all ranks over the CPU: a key-value store and a gloo group.

    There is one for each default process group, and a new one after an interruption.

    Attributes:
        store: the key-value store.
        group: gloo group of all ranks; None before the first call of :func:`cpu_group`.
        num_barriers: number of barriers that this rank has reached.
        waits_at: name of the barrier at which this rank waits; None if it does not wait.
    """

    store: RankStore
    group: dist.ProcessGroup | None = None
    num_barriers: int = 0
    waits_at: str | None = None

    @contextmanager
    def waiting_at(self, name: str) -> Iterator[None]:
        """Context manager in which the hang watch reports that this rank waits at barrier ``name``."""
        self.waits_at = name
        try:
            yield
        finally:
            self.waits_at = None


_connections: weakref.WeakKeyDictionary[dist.ProcessGroup, Connection] = weakref.WeakKeyDictionary()
_left: list[Connection] = []
"""Replaced connections, kept alive: their groups may be in a collective, for whose end their destructors would wait."""
_num_connections = 0
DEFAULT_BARRIER_TIMEOUT = 1800.0
"""Default seconds for which a rank waits at a barrier."""
_timeout_seconds = DEFAULT_BARRIER_TIMEOUT


def set_barrier_timeout(seconds: float) -> None:
    """Set for how many seconds barriers wait by default; the value must be the same on all ranks."""
    global _timeout_seconds
    _timeout_seconds = seconds


def barrier_timeout() -> float:
    """Return the default timeout of barriers in seconds."""
    return _timeout_seconds


def connection() -> Connection | None:
    """Return this rank's store and group for communication with all ranks; None in a single-process run."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    world = dist.group.WORLD
    assert world is not None
    if world not in _connections:
        _connections[world] = _connect(world)
    return _connections[world]


def renew_connection() -> None:
    """Replace the store and the group after all ranks were interrupted, perhaps in a collective of the old group.

    Every rank must call this; the next call of :func:`cpu_group` creates the new group.
    """
    world = dist.group.WORLD
    assert world is not None
    _left.append(_connections[world])
    _connections[world] = _connect(world)


def _connect(world: dist.ProcessGroup) -> Connection:
    global _num_connections
    # A store can outlive its process group: torchrun keeps one for all groups that a process begins.
    _num_connections += 1
    store = RankStore(default_store(), f"rlightning/{_num_connections}/", dist.get_rank(), dist.get_world_size())
    weakref.finalize(world, store.close).atexit = False  # the failure watch uses it until the process ends
    return Connection(store)


def cpu_group() -> dist.ProcessGroup | None:
    """Return the gloo group over all ranks, or None in a single-process run.

    Every rank must make the first call, which creates the group.
    """
    shared = connection()
    if shared is None:
        return None
    if shared.group is None:
        shared.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_timeout_seconds))
    return shared.group
