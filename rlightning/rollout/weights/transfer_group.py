"""A process group of one sender and its receivers, in which no process waits without an end.

::

    sender, rank 0            the rendezvous (TCP)     receivers, ranks 1 to n
    connect():                joined/1 .. joined/n <-  connect()
                              connect          ->      both make the process group
                              ready/1 .. ready/n   <-
    broadcast()               == NCCL or gloo =====>   broadcast()
    leave(), or a failure     over             ->      broadcast() fails at once

It is made without torch's default group, which a process may have or not, and leaves that alone.
"""

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlightning import intervals
from rlightning.processes.liveness import Deadline
from rlightning.rollout.weights.rendezvous import Place, RendezvousServer, find_own_address, join_rendezvous

SENDER = 0
"""Rank of the sender in the process group."""

_c10d: Any = dist
"""torch.distributed without types: not each build has NCCL, and much of what is used here has no types."""


class TransferOverError(RuntimeError):
    """The other side has left, or has failed."""


class TransferGroup:
    """One member's side of the group. All but :meth:`interrupt` is called by one thread.

    Nothing but this object holds torch's group, whose destructor waits for its work.

    Args:
        place: of the member. The sender's is ``server.places[0]``.
        device: of what is sent and received.
        server: of the rendezvous, on the sender's side; it listens until :meth:`leave`.

    Raises:
        OSError: the rendezvous cannot be joined.
    """

    def __init__(self, place: Place, device: torch.device, server: RendezvousServer | None = None) -> None:
        self.place, self.device = place, device
        # torch holds the C++ part of the store only
        self._store = join_rendezvous(place) if server is None else server.store
        self._server = server
        self._group: Any = None
        self._is_over = False

    def connect(self) -> None:
        """Return when all members are connected.

        Raises:
            OSError, RuntimeError: if that took too long or failed; nothing but :meth:`leave` is left to do then.
        """
        rank = self.place.rank
        try:
            if rank == SENDER:
                self._wait_for_receivers("joined")
                self._store.set("connect", "")
                self._make_group()
                self._wait_for_receivers("ready")
            else:
                self._store.set(f"joined/{rank}", "")
                self._wait_until(lambda: self._store.check(["connect"]))
                self._make_group()
                self._store.set(f"ready/{rank}", "")
        except (OSError, RuntimeError):
            self._end()
            raise

    def broadcast(self, data: Tensor) -> None:
        """Return when ``data`` has been sent, or overwritten with the sender's.

        Raises:
            OSError, RuntimeError: if it took too long or failed; nothing but :meth:`leave` is left to do then.
        """
        if self._group is None:
            raise TransferOverError("There is no connection.")
        work = self._group.broadcast(data, SENDER)
        self._wait_until(work.is_completed, intervals.TRANSFER_POLL_INTERVAL)
        work.wait()  # It is over: this raises what went wrong, and lets the current stream go on after the transfer's.

    def interrupt(self, reason: str) -> None:
        """Let what goes on, or is called next, fail for ``reason`` in all members. The sender's; thread-safe."""
        self._store.set("over", reason)

    def leave(self, reason: str) -> None:
        """End the group; after the sender, which gives a reason, no receiver waits any more."""
        if self._server is not None:
            self.interrupt(reason)
            self._server.close()
        self._end()

    def _check(self) -> None:
        try:
            reason = self._store.get("over").decode() if self._store.check(["over"]) else None
        except RuntimeError as error:
            raise TransferOverError("The sender is gone.") from error
        if reason is not None:
            raise TransferOverError(reason)

    def _wait_until(self, is_done: Callable[[], bool], poll_interval: float | None = None) -> None:
        """Poll until something is done, or the group is over; the latter every ``intervals.POLL_INTERVAL`` seconds.

        Raises:
            TimeoutError: if it takes too long.
        """
        next_check = Deadline(0.0)

        def is_met() -> bool:
            nonlocal next_check
            if next_check.is_over:
                self._check()
                next_check = Deadline(intervals.POLL_INTERVAL)
            return is_done()

        if not Deadline(self.place.timeout).wait_until(is_met, poll_interval):
            raise TimeoutError(f"it took longer than {self.place.timeout:g} s")

    def _wait_for_receivers(self, key: str) -> None:
        """Wait until all receivers have written ``key``."""
        missing = set(range(1, self.place.size))

        def are_all_there() -> bool:
            missing.difference_update([rank for rank in missing if self._store.check([f"{key}/{rank}"])])
            return not missing

        try:
            self._wait_until(are_all_there)
        except TimeoutError as error:
            numbers = ", ".join(str(rank - 1) for rank in sorted(missing))
            raise TimeoutError(f"no sign of number {numbers} of 0 to {self.place.size - 2}, and {error}") from None

    def _make_group(self) -> None:
        """Make torch's group. All ranks do so at the same time; it may block for ever in C++, so a thread does it."""
        results: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def make() -> None:
            try:
                self._make_torch_group()
                results.put(None)
            except Exception as error:  # raised again by the thread that waits
                results.put(error)

        threading.Thread(target=make, name="connect-transfer-group", daemon=True).start()
        self._wait_until(lambda: not results.empty())
        error = results.get()
        if error is not None:
            raise error

    def _make_torch_group(self) -> None:
        names = _c10d.PrefixStore("transfer", self._store)
        is_cuda = self.device.type == "cuda"
        if is_cuda:
            torch.cuda.set_device(self.device)  # of this thread
        group = (_make_nccl_group if is_cuda else _make_gloo_group)(names, self.place)
        if self._is_over:
            return  # the other thread has stopped waiting
        self._group = group
        del group
        self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))  # NCCL connects with the first collective

    def _end(self) -> None:
        """End torch's group, whatever it is doing. That may hang in its turn, so it is left to a thread in the end."""

        def abort() -> None:
            with contextlib.suppress(RuntimeError):  # some operation of it has failed: that is why it is ended
                self._group.abort()
            self._group = None

        self._is_over = True
        if self._group is not None:
            thread = threading.Thread(target=abort, name="end-transfer-group", daemon=True)
            thread.start()
            thread.join(intervals.GROUP_LEAVE_GRACE)


def _make_nccl_group(store: object, place: Place) -> object:
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = _torch_timeout(place)
    with _without_watchdog():
        return _c10d.ProcessGroupNCCL(store, place.rank, place.size, options)


def _make_gloo_group(store: object, place: Place) -> object:
    options = _c10d.ProcessGroupGloo._Options()
    options._timeout = _torch_timeout(place)
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=find_own_address(place.host, place.port))]
    return _c10d.ProcessGroupGloo(store, place.rank, place.size, options)


def _torch_timeout(place: Place) -> timedelta:
    """Return torch's timeout, twice the group's: an operation's caller times out before, and its error says why."""
    return timedelta(seconds=2 * place.timeout)


@contextlib.contextmanager
def _without_watchdog() -> Iterator[None]:
    """Make an NCCL group that leaves errors to its caller; by default a thread of it ends the whole process."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
