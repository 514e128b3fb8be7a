"""Accepting connections from anybody, such that strangers cannot use up this process's file descriptors."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

from rlightning import intervals
from rlightning.rollout.engine_link import hang_up
from rlightning.rollout.engine_wire import make_connection

log = logging.getLogger(__name__)

MAX_UNKNOWN = 32
"""Connections that have not authenticated, at once."""


class Acceptor:
    """Accepts connections in a thread, and handles each in a thread of its own.

    Of more than :data:`MAX_UNKNOWN` connections that have not authenticated the oldest is closed, and so is the oldest
    where this process has no file descriptor, or no thread, for a new one.

    Args:
        listener: a listening socket.
        authenticate: returns when the other end may be served.
        serve: called then with the connection and its address; it is closed afterwards.
    """

    def __init__(
        self,
        listener: socket.socket,
        authenticate: Callable[[Connection], None],
        serve: Callable[[Connection, str], None],
    ) -> None:
        self._listener = listener
        self._authenticate, self._serve = authenticate, serve
        self._unknown: list[Connection] = []  # the oldest first
        self._lock = threading.Lock()
        self._is_closed = False
        self._is_short = False
        threading.Thread(target=self._accept, name="accept-connections", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections; those that are served go on."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # or accept() would go on waiting
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                end, address = self._listener.accept()
            except OSError as error:
                if not self._is_closed:
                    self._make_room(error)
                continue
            try:
                connection = make_connection(end)
            except OSError as error:
                end.close()
                self._make_room(error)
                continue
            with self._lock:
                self._unknown.append(connection)
                excess = self._unknown[:-MAX_UNKNOWN]
            for other in excess:
                self._shed(other)
            peer = f"{address[0]}:{address[1]}"
            thread = threading.Thread(target=self._handle, args=(connection, peer), name="connection", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # this process may have no more threads
                with self._lock:
                    self._unknown.remove(connection)
                    connection.close()
                self._make_room(error)

    def _make_room(self, error: Exception) -> None:
        """Close the oldest connection that has not authenticated; say once that connections fail."""
        if not self._is_short:
            self._is_short = True
            log.warning("A connection could not be accepted: %s. The oldest that are idle are closed.", error)
        with self._lock:
            oldest = self._unknown[:1]
        for connection in oldest:
            self._shed(connection)
        time.sleep(intervals.SHORT_POLL_INTERVAL if oldest else intervals.POLL_INTERVAL)

    def _shed(self, connection: Connection) -> None:
        """Have the thread that reads from a connection find it at its end, and close it."""
        with self._lock:
            if connection not in self._unknown:
                return
            self._unknown.remove(connection)
            hang_up(connection)

    def _handle(self, connection: Connection, peer: str) -> None:
        is_served = False
        try:
            self._authenticate(connection)
            with self._lock:
                is_served = connection in self._unknown
                if is_served:
                    self._unknown.remove(connection)
            if is_served:
                self._serve(connection, peer)
        except (AuthenticationError, EOFError, OSError) as error:
            with self._lock:
                is_shed = not is_served and connection not in self._unknown
            if not is_shed:
                reason = "it said nothing" if isinstance(error, BlockingIOError) else error or "it was closed"
                log.warning("The connection from %s was not let in: %s.", peer, reason)
        finally:
            with self._lock:  # no other thread may take its file descriptor's number for it
                if connection in self._unknown:
                    self._unknown.remove(connection)
                connection.close()
