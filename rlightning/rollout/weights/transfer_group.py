"""A process group of one sender and its receivers, in which every wait has a timeout or can be interrupted.

::

    sender, rank 0            the rendezvous (TCP)     receivers, ranks 1 to n
    connect():                joined/1 .. joined/n <-  connect()
                              connect          ->      both make the process group
                              ready/1 .. ready/n   <-
    broadcast()               == NCCL or gloo =====>   broadcast()
    leave(), or a failure     over             ->      broadcast() fails at once

The group is independent of torch's default process group, which may or may not exist.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
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
"""torch.distributed without types: some builds lack NCCL, and much of its interface is untyped."""


class TransferOverError(RuntimeError):
    """The other side has left the group, or has failed."""


class TransferGroup:
    """One process's side of a group that broadcasts weights to engines. Not thread-safe, except for :meth:`interrupt`.

    Only this object references torch's group, whose destructor waits for its work.

    Args:
        place: address and rank of this process; the sender's is ``server.places[0]``.
        device: device of the broadcast tensors.
        server: on the sender's side the server of the rendezvous, which listens until :meth:`leave`.

    Raises:
        OSError: the rendezvous cannot be joined.
    """

    def __init__(self, place: Place, device: torch.device, server: RendezvousServer | None = None) -> None:
        self.place, self.device = place, device
        # torch keeps only the C++ part of the store
        self._store = join_rendezvous(place) if server is None else server.store
        self._server = server
        self._group: Any = None
        self._is_over = False

    def connect(self) -> None:
        """Wait until all members are connected; every member must call it.

        Raises:
            OSError, RuntimeError: connecting failed or took too long; afterwards only :meth:`leave` may be called.
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
        """Send the tensor ``data`` to all receivers, or on a receiver overwrite it with the sender's; return when done.

        Raises:
            OSError, RuntimeError: the broadcast failed or took too long; afterwards only :meth:`leave` may be called.
        """
        if self._group is None:
            raise TransferOverError("There is no connection.")
        work = self._group.broadcast(data, SENDER)
        self._wait_until(work.is_completed, intervals.TRANSFER_POLL_INTERVAL)
        work.wait()  # The work has ended: this raises its error, and orders the current stream after the transfer's.

    def interrupt(self, reason: str) -> None:
        """On the sender, make the running or next operation of all members fail with ``reason``. Thread-safe."""
        self._store.set("over", reason)

    def leave(self, reason: str) -> None:
        """Leave the group; when the sender leaves, the waits of receivers fail with ``reason``."""
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
        """Poll ``is_done`` until it returns True; every ``intervals.POLL_INTERVAL`` seconds check the group's state.

        Raises:
            TimeoutError: the group's timeout has passed.
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
        """Create torch's group, on all ranks at the same time; in a thread, because torch may block forever."""
        made: Future[None] = Future()

        def make() -> None:
            try:
                self._make_torch_group()
                made.set_result(None)
            except Exception as error:  # the waiting thread raises it again
                made.set_exception(error)

        threading.Thread(target=make, name="connect-transfer-group", daemon=True).start()
        self._wait_until(made.done)
        made.result()

    def _make_torch_group(self) -> None:
        names = _c10d.PrefixStore("transfer", self._store)
        is_cuda = self.device.type == "cuda"
        if is_cuda:
            torch.cuda.set_device(self.device)  # the current device is set per thread
        group = (_make_nccl_group if is_cuda else _make_gloo_group)(names, self.place)
        if self._is_over:
            return  # the other thread has stopped waiting
        self._group = group
        del group
        self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))  # NCCL connects with the first collective

    def _end(self) -> None:
        """Abort torch's group in a thread, which may hang; wait for it ``intervals.GROUP_LEAVE_GRACE`` seconds."""

        def abort() -> None:
            with contextlib.suppress(RuntimeError):  # aborted because an operation has failed, which may fail again
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
    """Return torch's timeout: twice the group's, so that this module's timeout passes first, with a clearer error."""
    return timedelta(seconds=2 * place.timeout)


@contextlib.contextmanager
def _without_watchdog() -> Iterator[None]:
    """Context manager in which NCCL groups' errors are raised, rather than NCCL's watchdog ending the process."""
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
