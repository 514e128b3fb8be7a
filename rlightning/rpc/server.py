"""Serves clients over TCP, or the parent process over an inherited socket pair."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from rlightning import intervals
from rlightning.rpc.authentication import AuthenticationError, BusyError, authenticate_client
from rlightning.rpc.peer import Method, Peer, PeerSettings, limit

if TYPE_CHECKING:
    from typing import Unpack

log = logging.getLogger(__name__)

MAX_UNAUTHENTICATED = 32
"""Maximum number of concurrent connections whose client is not authenticated yet."""


class Server:
    """Accepts connections, authenticates each client, and serves it.

    With more than ``max_unauthenticated`` unauthenticated connections, or without a file descriptor for a new one, the
    oldest unauthenticated connection is closed: unauthenticated connections cannot block clients.

    Args:
        listener: a listening socket, closed by :meth:`close`.
        key: key with which clients authenticate; None admits processes of this user on this host.
        serve: called with the socket and the address of each authenticated client; usually opens a :class:`Peer`, and
            returns when that is closed. Its errors are logged.
        max_clients: maximum number of concurrent clients; further clients get a BusyError.
        max_unauthenticated: maximum number of concurrent connections before authentication.
        timeout: maximum seconds for authentication; None for ``intervals.CONNECT_TIMEOUT``.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes | None,
        serve: Callable[[socket.socket, str], Awaitable[None]],
        *,
        max_clients: int = 64,
        max_unauthenticated: int = MAX_UNAUTHENTICATED,
        timeout: float | None = None,
    ) -> None:
        self._listener, self._key, self._serve, self.max_clients = listener, key, serve, max_clients
        self._max_unauthenticated, self._timeout = max_unauthenticated, timeout
        self._unauthenticated: dict[asyncio.Task[None], socket.socket] = {}  # the oldest first
        self._served: set[asyncio.Task[None]] = set()
        self._is_short = False
        listener.setblocking(False)
        self._accepting = asyncio.ensure_future(self._accept())

    async def close(self) -> None:
        """Accept no more connections, and close the existing ones."""
        tasks = [self._accepting, *self._unauthenticated, *self._served]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                end, address = await loop.sock_accept(self._listener)
            except OSError as error:
                await self._make_room(error)
                continue
            end.setblocking(False)
            task = asyncio.ensure_future(self._handle(end, f"{address[0]}:{address[1]}"))
            self._unauthenticated[task] = end
            task.add_done_callback(self._forget)
            if len(self._unauthenticated) > self._max_unauthenticated:
                next(iter(self._unauthenticated)).cancel()

    async def _make_room(self, error: OSError) -> None:
        """Close the oldest unauthenticated connection; log once that connections are being refused."""
        if not self._is_short:
            self._is_short = True
            log.warning("A connection could not be accepted: %s. The oldest that are idle are closed.", error)
        oldest = next(iter(self._unauthenticated), None)
        if oldest is not None:
            oldest.cancel()
        await asyncio.sleep(intervals.SHORT_POLL_INTERVAL if oldest else intervals.POLL_INTERVAL)

    def _forget(self, task: "asyncio.Task[None]") -> None:
        self._unauthenticated.pop(task, None)
        self._served.discard(task)

    def _admit(self, task: "asyncio.Task[None]") -> bool:
        """Add an authenticated client, unless there are ``max_clients``; return whether it was added."""
        if len(self._served) >= self.max_clients:
            return False
        del self._unauthenticated[task]
        self._served.add(task)
        return True

    async def _handle(self, end: socket.socket, client: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            seconds = intervals.CONNECT_TIMEOUT if self._timeout is None else self._timeout
            await limit(authenticate_client(end, self._key, partial(self._admit, task)), seconds)
            await self._serve(end, client)
        except (AuthenticationError, OSError) as error:
            if not isinstance(error, BusyError):
                reason = str(error) or "it did not answer"
                log.warning("The connection from %s was closed: %s.", client, reason)
        except Exception:
            log.exception("Serving %s failed.", client)
        finally:
            with contextlib.suppress(OSError):
                end.close()


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 selects a free port.

    Raises:
        OSError: the address cannot be used.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OverflowError as error:  # the port's number is out of range
        raise OSError(str(error)) from error


async def serve_parent(fd: int, methods: Mapping[str, Method], **settings: "Unpack[PeerSettings]") -> Peer:
    """Return the parent process as a peer, over the socket that it passed as file descriptor ``fd``.

    The parent may call the ``methods``; ``settings`` are those of :class:`Peer`.
    """
    settings.setdefault("name", "the parent process")
    settings.setdefault("heartbeat_timeout", float("inf"))
    return await Peer.open(socket.socket(fileno=fd), methods, **settings)
