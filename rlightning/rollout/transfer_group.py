"""A process group of one sender and its receivers, none of whom waits without an end.

::

    sender, rank 0            the rendezvous (TCP)     receiver, ranks 1 to n
    TransferSender()          listens on `host`
                              joined/1 .. joined/n <-  TransferReceiver()
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
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlightning import intervals
from rlightning.rollout.rendezvous import SECRET_BYTES, RendezvousServer, RendezvousStore, join_rendezvous

SENDER = 0
"""The rank."""

_c10d: Any = dist
"""Not each build of torch has NCCL, and much of what is used of it here has no types."""


class GivenUpError(RuntimeError):
    """It is of no use to wait any longer."""


@dataclass(frozen=True, slots=True)
class Place:
    """A receiver's place in the group, and where to meet.

    Attributes:
        host, port: of the rendezvous.
        rank: the receiver's.
        size: of the group.
        timeout: seconds that connecting may take, and that a broadcast may take.
        secret: that the rendezvous asks for. Only who may join has it.
    """

    host: str
    port: int
    rank: int
    size: int
    timeout: float
    secret: bytes = field(repr=False)


class TransferSender:
    """The sender's end. All but :meth:`interrupt` is called by one thread.

    Args:
        num_receivers: who will join.
        device: what is sent lies here.
        host: this machine's address as the receivers reach it. The rendezvous listens on that address alone, and asks
            whoever connects for the secret of this group.
        timeout: seconds that connecting may take, and that a broadcast may take.

    Attributes:
        places: one for each receiver.
    """

    def __init__(self, num_receivers: int, device: torch.device, *, host: str, timeout: float) -> None:
        self._device = device
        secret = secrets.token_bytes(SECRET_BYTES)
        server = RendezvousServer(host, secret, timeout)
        weakref.finalize(self, server.close)
        self._store = server.store
        self._place, *self.places = (
            Place(host, server.port, rank, num_receivers + 1, timeout, secret) for rank in range(num_receivers + 1)
        )
        self._group = _Group()
        self._interruption: str | None = None

    def connect(self) -> None:
        """Return when all receivers are connected.

        Raises:
            OSError, RuntimeError: if that took too long or failed; nothing but :meth:`leave` is left to do then.
        """
        self._wait_for("joined")
        self._store.set("connect", "")
        self._group.connect(self._store, self._place, self._device, self._check)
        self._wait_for("ready")

    def broadcast(self, data: Tensor) -> None:
        """Return when ``data`` has been sent.

        Raises:
            OSError, RuntimeError: as :meth:`connect`.
        """
        self._group.broadcast(data, self._place.timeout, self._check)

    def interrupt(self, reason: str) -> None:
        """Let what goes on, or is called next, fail for ``reason``. Any thread may call this."""
        self._interruption = reason

    def leave(self, reason: str) -> None:
        """Tell the receivers, so that none waits for what does not come, and end the group."""
        with contextlib.suppress(RuntimeError):  # the store's
            self._store.set("over", reason)
        self._group.end()

    def _check(self) -> None:
        if self._interruption is not None:
            raise GivenUpError(self._interruption)

    def _wait_for(self, key: str) -> None:
        """Wait until all receivers have written ``key``."""
        missing = {place.rank for place in self.places}

        def are_all_there() -> bool:
            missing.difference_update([rank for rank in missing if self._store.check([f"{key}/{rank}"])])
            return not missing

        try:
            _wait_until(are_all_there, self._check, self._place.timeout, intervals.SHORT_POLL_INTERVAL)
        except TimeoutError as error:
            numbers = ", ".join(str(rank - 1) for rank in sorted(missing))
            raise TimeoutError(f"no sign of number {numbers} of 0 to {len(self.places) - 1}, and {error}") from None


class TransferReceiver:
    """A receiver's end; it is connected when it has been made.

    Args:
        place: from the sender.
        device: what is received comes here.

    Raises:
        OSError, RuntimeError: if that took too long or failed.
    """

    def __init__(self, place: Place, device: torch.device) -> None:
        self._store = join_rendezvous(place.host, place.port, place.secret, place.timeout)
        self._timeout = place.timeout
        self._group = _Group()
        self._store.set(f"joined/{place.rank}", "")
        try:
            _wait_until(
                lambda: self._store.check(["connect"]), self._check, place.timeout, intervals.SHORT_POLL_INTERVAL
            )
            self._group.connect(self._store, place, device, self._check)
            self._store.set(f"ready/{place.rank}", "")
        except (OSError, RuntimeError):
            self._group.end()
            raise

    def broadcast(self, data: Tensor) -> None:
        """Return when ``data`` has been overwritten with the sender's.

        Raises:
            OSError, RuntimeError: if it took too long or failed; nothing but :meth:`leave` is left to do then.
        """
        self._group.broadcast(data, self._timeout, self._check)

    def leave(self) -> None:
        """End the group."""
        self._group.end()

    def _check(self) -> None:
        try:
            reason = self._store.get("over").decode() if self._store.check(["over"]) else None
        except RuntimeError as error:
            raise GivenUpError("The sender is gone.") from error
        if reason is not None:
            raise GivenUpError(reason)


class _Group:
    """torch's process group, which nobody but this object holds: its destructor waits for what it is doing."""

    def __init__(self) -> None:
        self._torch_group: Any = None
        self._store: RendezvousStore | None = None  # torch holds what is C++'s of it, not what is Python's
        self._is_over = False

    def connect(self, store: RendezvousStore, place: Place, device: torch.device, check: Callable[[], None]) -> None:
        """Make it. All ranks do so at the same time."""
        self._store = store

        def connect() -> None:
            names = _c10d.PrefixStore("transfer", store)
            if device.type == "cuda":
                torch.cuda.set_device(device)  # of this thread
            made = (_make_nccl_group if device.type == "cuda" else _make_gloo_group)(names, place)
            if self._is_over:
                return  # nobody waits any more
            self._torch_group = made
            del made
            # NCCL connects with the first collective.
            self.broadcast(torch.zeros(1, dtype=torch.uint8, device=device), place.timeout, check)

        _call_in_thread(connect, check, place.timeout)

    def broadcast(self, data: Tensor, timeout: float, check: Callable[[], None]) -> None:
        """Return when ``data`` has been sent, or is there."""
        if self._torch_group is None:
            raise GivenUpError("There is no connection.")
        work = self._torch_group.broadcast(data, SENDER)
        _wait_until(work.is_completed, check, timeout, intervals.TRANSFER_POLL_INTERVAL)
        work.wait()  # It is over: this raises what went wrong, and lets the current stream go on after the transfer's.

    def end(self) -> None:
        """End it whatever it is doing. That may hang in its turn: it has a thread, and some seconds."""

        def end() -> None:
            with contextlib.suppress(RuntimeError):  # some operation of it has failed: that is why it is ended
                self._torch_group.abort()
            self._torch_group = None

        self._is_over = True
        if self._torch_group is not None:
            thread = threading.Thread(target=end, name="end-transfer-group", daemon=True)
            thread.start()
            thread.join(intervals.GROUP_LEAVE_GRACE)


def _make_nccl_group(store: Any, place: Place) -> Any:
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = _limit_of_torch(place)
    with _without_watchdog():
        return _c10d.ProcessGroupNCCL(store, place.rank, place.size, options)


def _make_gloo_group(store: Any, place: Place) -> Any:
    options = _c10d.ProcessGroupGloo._Options()
    options._timeout = _limit_of_torch(place)
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=_own_address(place))]
    return _c10d.ProcessGroupGloo(store, place.rank, place.size, options)


def _limit_of_torch(place: Place) -> timedelta:
    """For an operation that nobody waits for any more: who waits gives up before, and says why in a sentence."""
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


def _call_in_thread(call: Callable[[], None], check: Callable[[], None], timeout: float) -> None:
    """Call something that may block for ever in C++; its thread is given up when the time is over."""
    results: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            call()
            results.put(None)
        except Exception as error:  # raised again by who waits
            results.put(error)

    threading.Thread(target=run, name="connect-transfer-group", daemon=True).start()
    _wait_until(lambda: not results.empty(), check, timeout, intervals.SHORT_POLL_INTERVAL)
    error = results.get()
    if error is not None:
        raise error


def _wait_until(is_done: Callable[[], bool], check: Callable[[], None], timeout: float, poll: float) -> None:
    """Wait.

    Args:
        is_done: asked every ``poll`` seconds.
        check: raises when it is no use to wait any longer; asked every :data:`~rlightning.intervals.POLL_INTERVAL`.
        timeout: seconds.
        poll: seconds.

    Raises:
        TimeoutError: when the time is over.
    """
    start = time.monotonic()
    next_check = start
    while True:
        now = time.monotonic()
        if now >= next_check:
            check()
            next_check = now + intervals.POLL_INTERVAL
        if is_done():
            return
        if now - start > timeout:
            raise TimeoutError(f"it took longer than {timeout:g} s")
        time.sleep(poll)
