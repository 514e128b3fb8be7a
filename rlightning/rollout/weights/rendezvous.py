"""The rendezvous at which a sender and its receivers form a process group: a store that requires the group's key.

torch's TCPStore serves any process that connects, and lists its keys. This store is served by a
:class:`~rlightning.rpc.Server`, which authenticates a client before it parses a message.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from rlightning import intervals, rpc
from rlightning.errors import ConfigError
from rlightning.processes.liveness import Deadline

if TYPE_CHECKING:
    Store = Any  # the types of torch's Store name C++'s overloads
else:
    Store = dist.Store


@dataclass(frozen=True, slots=True)
class Place:
    """The address, rank and key with which one member joins a process group.

    Attributes:
        host, port: address of the rendezvous.
        rank: rank of the member; 0 is the sender.
        size: number of members.
        timeout: maximum seconds for connecting, and for a broadcast.
        key: key with which members authenticate.
    """

    host: str
    port: int
    rank: int
    size: int
    timeout: float
    key: bytes = field(repr=False)


class RendezvousServer:
    """Serves a key-value store, as in torch.distributed, by which the members of one process group find each other.

    Args:
        host: the only address of this machine on which the server listens.
        size: number of members.
        timeout: seconds, see :class:`Place`.

    Attributes:
        places: one for each member.
        store: the store, for the sender in this process.

    Raises:
        ConfigError: the server cannot listen on ``host``.
    """

    def __init__(self, host: str, size: int, timeout: float) -> None:
        try:
            listener = rpc.listen(host, 0)
        except OSError as error:
            raise ConfigError(
                f"The trainer cannot listen on {host} ({error}). Give the address of one of this machine's own "
                "interfaces."
            ) from error
        key = rpc.new_key()
        port = int(listener.getsockname()[1])
        self.places = [Place(host, port, rank, size, timeout, key) for rank in range(size)]
        self.store: Store = dist.HashStore()  # type: ignore[attr-defined]
        self.store.set_timeout(timedelta(seconds=timeout))
        self._server = rpc.background_loop().call(rpc.Server, listener, key, self._serve, max_clients=size)

    def close(self) -> None:
        """Disconnect all members, and accept no more."""
        rpc.background_loop().run(self._server.close())

    async def _serve(self, end: socket.socket, client: str) -> None:
        store = self.store
        # These answer at once; clients poll for the others.
        operations = (store.set, store.get, store.check, store.add, store.delete_key)
        methods = {operation.__name__: partial(_answer, operation) for operation in operations}
        peer = await rpc.Peer.open(end, methods, name=client, heartbeat_timeout=float("inf"))
        try:
            await asyncio.wait([peer.closed])
        finally:
            peer.abort("the rendezvous is over")


async def _answer(operation: Callable[..., object], *arguments: object) -> object:
    return operation(*arguments)


class RemoteStore(Store):  # type: ignore[misc]
    """A client of a :class:`RendezvousServer` as torch's Store; not for the thread of the background event loop."""

    def __init__(self, peer: rpc.Peer, timeout: float) -> None:
        super().__init__()
        self._peer = peer
        self._timeout = timedelta(seconds=timeout)

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key in the server's store."""
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        """Wait until a key of the store has a value, and return it."""
        self.wait([key])
        return bytes(self._ask("get", key))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all these keys of the store have a value."""
        return bool(self._ask("check", list(keys)))

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to a key's integer in the store, which is 0 at first, and return the sum."""
        return int(self._ask("add", key, amount))

    def delete_key(self, key: str) -> bool:
        """Remove a key from the store; return whether it had a value."""
        return bool(self._ask("delete_key", key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all these keys of the store have a value.

        Raises:
            TimeoutError: the timeout has passed.
        """
        seconds = (timeout or self._timeout).total_seconds()
        if not Deadline(seconds).wait_until(lambda: self.check(keys)):
            raise TimeoutError(f"it took longer than {seconds:g} s")

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default timeout of :meth:`get` and :meth:`wait`."""
        self._timeout = timeout

    def _ask(self, operation: str, *arguments: object) -> bytes | int:
        work = self._peer.call(operation, *arguments, timeout=intervals.TRANSFER_TIMEOUT)
        try:
            answer: bytes | int = rpc.background_loop().run(work)
        except rpc.RPCError as error:
            raise RuntimeError(f"the rendezvous is over: {error}") from error
        return answer


def join_rendezvous(place: Place) -> RemoteStore:
    """Connect to a :class:`RendezvousServer`, and return a client of its store.

    Raises:
        OSError: the server does not listen, has another key, or does not answer.
    """
    url = rpc.make_url(place.host, place.port)
    work = rpc.connect(url, place.key, {}, timeout=place.timeout, heartbeat_timeout=float("inf"))
    try:
        return RemoteStore(rpc.background_loop().run(work), place.timeout)
    except rpc.AuthenticationError as error:
        raise OSError(f"{place.host}, port {place.port}, is the rendezvous of another group ({error})") from error


def find_own_address(host: str, port: int) -> str:
    """Return the address of this machine from which it connects to ``host``.

    Raises:
        OSError: there is no route to the host.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as end:
        end.connect(address)  # a UDP connect() sends nothing
        return str(end.getsockname()[0])
