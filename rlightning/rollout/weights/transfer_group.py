"""A process group of one sender and its receivers, in which no process waits without an end.

::

    sender, rank 0            the rendezvous (TCP)     receiver, ranks 1 to n
    SenderGroup()             listens on `host`
                              joined/1 .. joined/n <-  ReceiverGroup()
    connect(): all are there
                              connect          ->      both make the process group
                              ready/1 .. ready/n   <-
    broadcast()               == NCCL or gloo =====>   broadcast()
    leave(), or a failure     over             ->      broadcast() fails at once

It is made without torch's default group, which a process may have or not, and leaves that alone.
"""

import contextlib
import os
import queue
import socket
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlightning import intervals
from rlightning.rollout.weights.rendezvous import Place, RendezvousServer, Store, join_rendezvous, wait_until

SENDER = 0
"""The rank."""

_c10d: Any = dist
"""Not each build of torch has NCCL, and much of what is used of it here has no types."""


class TransferOverError(RuntimeError):
    """The other side has left, or has failed."""


class TransferGroup(ABC):
    """One member's side of the group. Nothing but this object holds torch's group, whose destructor waits for its work.

    Args:
        place: of the member.
        store: of the rendezvous. torch holds its C++ part only, so the object is kept here.
        device: of what is sent and received.
    """

    def __init__(self, place: Place, store: Store, device: torch.device) -> None:
        self.place, self.store, self.device = place, store, device
        self._group: Any = None
        self._is_over = False

    @abstractmethod
    def check(self) -> None:
        """Raise TransferOverError if there is nothing to wait for any more."""

    def broadcast(self, data: Tensor) -> None:
        """Return when ``data`` has been sent, or overwritten with the sender's.

        Raises:
            OSError, RuntimeError: if it took too long or failed; nothing but :meth:`end` is left to do then.
        """
        if self._group is None:
            raise TransferOverError("There is no connection.")
        work = self._group.broadcast(data, SENDER)
        self.wait_until(work.is_completed, intervals.TRANSFER_POLL_INTERVAL)
        work.wait()  # It is over: this raises what went wrong, and lets the current stream go on after the transfer's.

    def wait_until(self, is_done: Callable[[], bool], poll_interval: float) -> None:
        """See :func:`~rlightning.rollout.weights.rendezvous.wait_until`."""
        wait_until(is_done, self.place.timeout, poll_interval, self.check)

    def end(self) -> None:
        """End the group, whatever it is doing. That may hang in its turn, so it is left to a thread after a while."""

        def abort() -> None:
            with contextlib.suppress(RuntimeError):  # some operation of it has failed: that is why it is ended
                self._group.abort()
            self._group = None

        self._is_over = True
        if self._group is not None:
            thread = threading.Thread(target=abort, name="end-transfer-group", daemon=True)
            thread.start()
            thread.join(intervals.GROUP_LEAVE_GRACE)

    def make_group(self) -> None:
        """Make torch's group. All ranks do so at the same time; it may block for ever in C++, so a thread does it."""
        results: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def make() -> None:
            try:
                self._make_group()
                results.put(None)
            except Exception as error:  # raised again by the thread that waits
                results.put(error)

        threading.Thread(target=make, name="connect-transfer-group", daemon=True).start()
        self.wait_until(lambda: not results.empty(), intervals.SHORT_POLL_INTERVAL)
        error = results.get()
        if error is not None:
            raise error

    def _make_group(self) -> None:
        names = _c10d.PrefixStore("transfer", self.store)
        is_cuda = self.device.type == "cuda"
        if is_cuda:
            torch.cuda.set_device(self.device)  # of this thread
        group = (_make_nccl_group if is_cuda else _make_gloo_group)(names, self.place)
        if self._is_over:
            return  # the other thread has stopped waiting
        self._group = group
        del group
        self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))  # NCCL connects with the first collective


class SenderGroup(TransferGroup):
    """The sender's side. All but :meth:`interrupt` is called by one thread.

    Args:
        num_receivers: that will join.
        device: what is sent lies here.
        host: this machine's address as the receivers reach it. The rendezvous listens on that address alone, and asks
            each process that connects for the key of this group.
        timeout: seconds that connecting may take, and that a broadcast may take.

    Attributes:
        places: one for each receiver.
    """

    def __init__(self, num_receivers: int, device: torch.device, *, host: str, timeout: float) -> None:
        server = RendezvousServer(host, num_receivers + 1, timeout)
        weakref.finalize(self, server.close)
        own, *self.places = server.places
        super().__init__(own, server.store, device)
        self._interruption: str | None = None

    def connect(self) -> None:
        """Return when all receivers are connected.

        Raises:
            OSError, RuntimeError: if that took too long or failed; nothing but :meth:`leave` is left to do then.
        """
        self._wait_for_receivers("joined")
        self.store.set("connect", "")
        self.make_group()
        self._wait_for_receivers("ready")

    def interrupt(self, reason: str) -> None:
        """Let what goes on, or is called next, fail for ``reason``. Any thread may call this."""
        self._interruption = reason

    def leave(self, reason: str) -> None:
        """Tell the receivers why nothing more comes, and end the group."""
        self.store.set("over", reason)
        self.end()

    def check(self) -> None:
        """See :meth:`TransferGroup.check`."""
        if self._interruption is not None:
            raise TransferOverError(self._interruption)

    def _wait_for_receivers(self, key: str) -> None:
        """Wait until all receivers have written ``key``."""
        missing = {place.rank for place in self.places}

        def are_all_there() -> bool:
            missing.difference_update([rank for rank in missing if self.store.check([f"{key}/{rank}"])])
            return not missing

        try:
            self.wait_until(are_all_there, intervals.SHORT_POLL_INTERVAL)
        except TimeoutError as error:
            numbers = ", ".join(str(rank - 1) for rank in sorted(missing))
            raise TimeoutError(f"no sign of number {numbers} of 0 to {len(self.places) - 1}, and {error}") from None


class ReceiverGroup(TransferGroup):
    """A receiver's side; it is connected when it has been made.

    Args:
        place: from the sender.
        device: what is received comes here.

    Raises:
        OSError, RuntimeError: if that took too long or failed.
    """

    def __init__(self, place: Place, device: torch.device) -> None:
        super().__init__(place, join_rendezvous(place), device)
        self.store.set(f"joined/{place.rank}", "")
        try:
            self.wait_until(lambda: self.store.check(["connect"]), intervals.SHORT_POLL_INTERVAL)
            self.make_group()
            self.store.set(f"ready/{place.rank}", "")
        except (OSError, RuntimeError):
            self.end()
            raise

    def check(self) -> None:
        """See :meth:`TransferGroup.check`."""
        try:
            reason = self.store.get("over").decode() if self.store.check(["over"]) else None
        except RuntimeError as error:
            raise TransferOverError("The sender is gone.") from error
        if reason is not None:
            raise TransferOverError(reason)


def _make_nccl_group(store: Any, place: Place) -> Any:
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = _torch_timeout(place)
    with _without_watchdog():
        return _c10d.ProcessGroupNCCL(store, place.rank, place.size, options)


def _make_gloo_group(store: Any, place: Place) -> Any:
    options = _c10d.ProcessGroupGloo._Options()
    options._timeout = _torch_timeout(place)
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=_own_address(place))]
    return _c10d.ProcessGroupGloo(store, place.rank, place.size, options)


def _torch_timeout(place: Place) -> timedelta:
    """For an operation that is not waited for any more: its caller times out before, with an error that says why."""
    return timedelta(seconds=2 * place.timeout)


def _own_address(place: Place) -> str:
    """The address of this machine from which the sender's is reached."""
    family, kind, _, _, address = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as end:
        end.connect(address)  # which sends nothing
        return str(end.getsockname()[0])


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
