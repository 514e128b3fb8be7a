"""The keys and values by which the members of a transfer group find each other, for those alone who know its secret.

torch's TCPStore serves whoever connects, and lists its keys to them. This one is served over connections that have
shown that they know the secret (multiprocessing's HMAC challenge, which sends nobody the secret).
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
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

SECRET_BYTES = 32

if TYPE_CHECKING:
    _Store = Any  # the types of torch's Store name C++'s overloads
else:
    _Store = dist.Store


class RendezvousStore(_Store):  # type: ignore[misc]
    """torch's Store over requests that are each answered at once.

    Args:
        ask: sends a request, the name of a method of :class:`RendezvousServer` and its arguments, and returns the
            answer. Any thread may call it.
        timeout: seconds that waiting for a key may take.
    """

    def __init__(self, ask: Callable[..., Any], timeout: float) -> None:
        super().__init__()
        self._ask = ask
        self._limit = timedelta(seconds=timeout)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key's value."""
        self._ask("put", key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for a key, and return its value."""
        self.wait([key])
        return bytes(self._ask("look_up", key))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have a value."""
        return bool(self._ask("has", list(keys)))

    def add(self, key: str, amount: int) -> int:
        """Add to a key's number, 0 at first, and return the sum."""
        return int(self._ask("increase", key, amount))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have a value.

        Raises:
            TimeoutError: when the time is over.
        """
        end = time.monotonic() + (timeout or self._limit).total_seconds()
        while not self.check(keys):
            if time.monotonic() > end:
                raise TimeoutError(f"nobody has set {', '.join(keys)}")
            time.sleep(intervals.SHORT_POLL_INTERVAL)

    def delete_key(self, key: str) -> bool:
        """Remove a key; whether it had a value."""
        return bool(self._ask("drop", key))

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long waiting for a key may take."""
        self._limit = timeout


class RendezvousServer:
    """Holds the keys and values, and serves them.

    Args:
        host: this machine's address that it listens on; no other.
        secret: that members have to know.
        timeout: seconds that waiting for a key may take.

    Attributes:
        port: that it listens on.
        store: this process's own.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(self, host: str, secret: bytes, timeout: float) -> None:
        try:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((host, 0), family=family)
        except OSError as error:
            raise ConfigError(
                f"The trainer cannot listen on {host} ({error}). Give the address of one of this machine's own "
                "interfaces."
            ) from error
        self._secret = secret
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._members: list[Connection] = []
        self._is_closed = False
        self.port = int(listener.getsockname()[1])
        self.store = RendezvousStore(self._answer, timeout)
        self._acceptor = Acceptor(listener, self._authenticate, self._serve)

    def put(self, key: str, value: bytes) -> None:
        """Set a key's value."""
        self._values[key] = value

    def look_up(self, key: str) -> bytes:
        """Return a key's value."""
        return self._values[key]

    def has(self, keys: list[str]) -> bool:
        """Whether all keys have a value."""
        return all(key in self._values for key in keys)

    def increase(self, key: str, amount: int) -> int:
        """Add to a key's number."""
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def drop(self, key: str) -> bool:
        """Remove a key."""
        return self._values.pop(key, None) is not None

    def close(self) -> None:
        """Serve nobody any more."""
        self._acceptor.close()
        with self._lock:
            self._is_closed = True
            for connection in self._members:
                hang_up(connection)

    def _answer(self, method: str, *arguments: Any) -> Any:
        with self._lock:
            return getattr(self, method)(*arguments)

    def _authenticate(self, connection: Connection) -> None:
        deliver_challenge(connection, self._secret)
        answer_challenge(connection, self._secret)

    def _serve(self, connection: Connection, peer: str) -> None:
        limit_waiting(connection, intervals.TRANSFER_TIMEOUT)
        with self._lock:
            if self._is_closed:
                return
            self._members.append(connection)
        try:
            with contextlib.suppress(EOFError, ConnectionError):  # the member has left
                while connection.poll(None):
                    connection.send(self._answer(*connection.recv()))
        finally:
            with self._lock:
                self._members.remove(connection)


def join_rendezvous(host: str, port: int, secret: bytes, timeout: float) -> RendezvousStore:
    """Connect to a server, and return its store.

    Raises:
        OSError: it is not there, has another secret, or does not answer.
    """
    connection = reach(host, port, timeout)
    try:
        answer_challenge(connection, secret)
        deliver_challenge(connection, secret)
    except (AuthenticationError, EOFError) as error:
        raise OSError(f"{host}, port {port}, is the rendezvous of others ({error or 'it has hung up'})") from error
    lock = threading.Lock()

    def ask(*request: Any) -> Any:
        try:
            with lock:
                connection.send(request)
                return connection.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError("the rendezvous is over") from error

    return RendezvousStore(ask, timeout)
