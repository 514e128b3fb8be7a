"""Where a sender and its receivers meet to form a process group: a store for those alone who know the group's key.

torch's TCPStore serves any process that connects, and lists its keys to it. This one is served over connections that
have shown that they know the key (multiprocessing's HMAC challenge, which does not send it).
"""

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from rlightning import intervals
from rlightning.errors import ConfigError
from rlightning.rollout.acceptor import Acceptor
from rlightning.rollout.engine_link import hang_up, limit_waiting
from rlightning.rollout.engine_wire import reach

if TYPE_CHECKING:
    Store = Any  # the types of torch's Store name C++'s overloads
else:
    Store = dist.Store

KEY_BYTES = 32
OPERATIONS = ("set", "get", "check", "add", "delete_key")
"""Of a store that are answered at once; what waits asks again and again."""


@dataclass(frozen=True, slots=True)
class Place:
    """A member's place in a process group, and where its members meet.

    Attributes:
        host, port: of the rendezvous.
        rank: of the member; 0 is the sender.
        size: of the group.
        timeout: seconds that connecting may take, and that a broadcast may take.
        key: that the rendezvous asks for.
    """

    host: str
    port: int
    rank: int
    size: int
    timeout: float
    key: bytes = field(repr=False)


class RendezvousServer:
    """Holds a store, and serves it to the members of one process group.

    Args:
        host: this machine's address that it listens on; no other.
        size: of the group.
        timeout: seconds, see :class:`Place`.

    Attributes:
        places: one for each member.
        store: the sender's.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(self, host: str, size: int, timeout: float) -> None:
        try:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((host, 0), family=family)
        except OSError as error:
            raise ConfigError(
                f"The trainer cannot listen on {host} ({error}). Give the address of one of this machine's own "
                "interfaces."
            ) from error
        self._key = secrets.token_bytes(KEY_BYTES)
        port = int(listener.getsockname()[1])
        self.places = [Place(host, port, rank, size, timeout, self._key) for rank in range(size)]
        self.store: Store = dist.HashStore()  # type: ignore[attr-defined]
        self.store.set_timeout(timedelta(seconds=timeout))
        self._members: list[Connection] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._acceptor = Acceptor(listener, self._authenticate, self._serve)

    def close(self) -> None:
        """Disconnect all members, and accept no more."""
        self._acceptor.close()
        with self._lock:
            self._is_closed = True
            for connection in self._members:
                hang_up(connection)

    def _authenticate(self, connection: Connection) -> None:
        deliver_challenge(connection, self._key)
        answer_challenge(connection, self._key)

    def _serve(self, connection: Connection, peer: str) -> None:
        limit_waiting(connection, intervals.TRANSFER_TIMEOUT)
        with self._lock:
            if self._is_closed:
                return
            self._members.append(connection)
        try:
            with contextlib.suppress(EOFError, ConnectionError):  # the member has left
                while connection.poll(None):
                    operation, *arguments = connection.recv()
                    assert operation in OPERATIONS, operation
                    connection.send(getattr(self.store, operation)(*arguments))
        finally:
            with self._lock:
                self._members.remove(connection)


class RemoteStore(Store):  # type: ignore[misc]
    """torch's Store over a connection to a :class:`RendezvousServer`. Any thread may use it.

    Args:
        connection: authenticated.
        timeout: seconds that waiting for a key may take.
    """

    def __init__(self, connection: Connection, timeout: float) -> None:
        super().__init__()
        self._connection = connection
        self._lock = threading.Lock()
        self._timeout = timedelta(seconds=timeout)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key's value."""
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        """Wait for a key, and return its value."""
        self.wait([key])
        return bytes(self._ask("get", key))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have a value."""
        return bool(self._ask("check", list(keys)))

    def add(self, key: str, amount: int) -> int:
        """Add to a key's number, 0 at first, and return the sum."""
        return int(self._ask("add", key, amount))

    def delete_key(self, key: str) -> bool:
        """Remove a key; whether it had a value."""
        return bool(self._ask("delete_key", key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have a value.

        Raises:
            TimeoutError: when the time is over.
        """
        seconds = (timeout or self._timeout).total_seconds()
        wait_until(lambda: self.check(keys), seconds, intervals.SHORT_POLL_INTERVAL)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long waiting for a key may take."""
        self._timeout = timeout

    def _ask(self, *request: Any) -> Any:
        try:
            with self._lock:
                self._connection.send(request)
                return self._connection.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError("the rendezvous is over") from error


def join_rendezvous(place: Place) -> RemoteStore:
    """Connect to a place's server, and return its store.

    Raises:
        OSError: it is not there, has another key, or does not answer.
    """
    connection = reach(place.host, place.port, place.timeout)
    try:
        answer_challenge(connection, place.key)
        deliver_challenge(connection, place.key)
    except (AuthenticationError, EOFError) as error:
        reason = error or "it closed the connection"
        raise OSError(f"{place.host}, port {place.port}, is the rendezvous of another group ({reason})") from error
    return RemoteStore(connection, place.timeout)


def wait_until(
    is_done: Callable[[], bool], timeout: float, poll_interval: float, check: Callable[[], None] = lambda: None
) -> None:
    """Poll until something is done.

    Args:
        is_done: asked every ``poll_interval`` seconds.
        timeout: seconds.
        poll_interval: seconds.
        check: raises if it cannot be done any more; asked every :data:`~rlightning.intervals.POLL_INTERVAL`.

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
        time.sleep(poll_interval)
