"""The wire of the failure watch: each rank keeps one TCP connection to a thread in rank 0, which says who failed first.

Messages are lines of JSON. A connection that closes without a farewell is a failure of its rank::

    rank -> hub   {"token": ..., "rank": 1}      hello
                  {"failed": {...}}              this rank has failed
                  {"ending": true}               this rank cleans up, because of another one's failure
                  {"bye": true}                  this rank ends, and all is well
                  {"seen": {...}}                a heartbeat: where this rank is
    hub -> rank   {"first": {...}}               the first failure of all
                  {"seen": {...}}                the answer to a heartbeat: where rank 0 is
    rank -> hub -> all other ranks
                  {"stacks": "why"}              record the stacks of your threads
                  {"kill": "..."}                kill this process if it is on your host: it does not run any more
"""

import contextlib
import json
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rlightning import intervals

log = logging.getLogger(__name__)

GONE = "is gone: it was killed, or ended without a word"
MESSAGE_BYTES = 4096
"""Read at once, and the most that a connection may send before it has said whose it is."""
MAX_UNKNOWN = 32
"""Connections that have not said so, at once, beside those of all ranks."""
RELAYED = {"stacks", "kill"}
"""Messages from a rank to all others."""


@dataclass(frozen=True)
class Failure:
    """What ended a run.

    Attributes:
        rank: the one that failed.
        text: what happened to it, such as "failed: ValueError: boom"; it follows upon "rank 1 ".
        exit_code: what all ranks end with.
        is_foreseen: whether the rank that failed says all of it in a line, so that the others say nothing.
    """

    rank: int
    text: str
    exit_code: int = 1
    is_foreseen: bool = False


class FailureHub(threading.Thread):
    """Rank 0's side. It lives until every rank has said farewell, or as long as its process.

    Args:
        world_size: how many ranks will connect, rank 0 included.
        on_first: called with the first failure before the ranks learn of it, in this thread.
        cause_of_death: what became of a rank that closed its connection; called in this thread, and may wait.

    Attributes:
        ending: the ranks that have failed or clean up.
        on_seen: called with a rank and its heartbeat, in this thread.
        on_farewell: called with a rank that ends well, in this thread.
    """

    on_seen: Callable[[int, dict[str, Any]], None]
    on_farewell: Callable[[int], None]

    def __init__(
        self,
        world_size: int,
        on_first: Callable[[Failure], None],
        cause_of_death: Callable[[int], str] = lambda rank: GONE,
    ) -> None:
        super().__init__(name="failure-hub", daemon=True)
        self.token = secrets.token_hex()
        self._world_size = world_size
        self._on_first = on_first
        self._cause_of_death = cause_of_death
        self.ending: set[int] = set()
        self.on_seen, self.on_farewell = lambda rank, heartbeat: None, lambda rank: None
        self._rank_0: dict[str, Any] | None = None
        if socket.has_dualstack_ipv6():
            self._server = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        else:
            self._server = socket.create_server(("", 0), backlog=1024)
        self.port = int(self._server.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._links: dict[socket.socket, Link] = {}
        self._num_farewells = 0
        self._reported: Failure | None = None
        self._decide_at = 0.0
        self._first: Failure | None = None

    def run(self) -> None:
        """Serve."""
        while self._num_farewells < self._world_size:
            waiting = self._reported is not None and self._first is None
            unknown = [link for link in self._links.values() if link.rank is None]
            timeout = intervals.HELLO_TIMEOUT if unknown else None
            events = self._selector.select(intervals.VERDICT_DELAY if waiting else timeout)
            for key, _ in sorted(events, key=lambda event: event[0].fileobj is self._server):  # who is here goes first
                if key.fileobj is self._server:
                    self._accept()
                elif (link := self._links.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                    self._read(link)
            self._shed(unknown)
            if self._reported is not None and time.monotonic() >= self._decide_at:
                self._decide(self._reported)
        self.close()

    def close(self) -> None:
        """Let go of all sockets; also what a forked child has to do with its copies."""
        for link in self._links.values():
            link.close()
        self._server.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError as error:  # this process has no file descriptor left, or the other end is gone
            log.debug("A connection to the failure watch could not be accepted: %s", error)
            oldest = next((link for link in self._links.values() if link.rank is None), None)
            if oldest is not None:
                self._drop(oldest)
            time.sleep(intervals.SHORT_POLL_INTERVAL)
            return
        try:
            self._links[connection] = Link(connection)
        except OSError:
            connection.close()
            return
        self._selector.register(connection, selectors.EVENT_READ)

    def _shed(self, unknown: list["Link"]) -> None:
        """Close connections, the oldest first, that have not said whose they are in time, or are too many."""
        latest = time.monotonic() - intervals.HELLO_TIMEOUT
        excess = len(unknown) - self._world_size - MAX_UNKNOWN
        for number, link in enumerate(unknown):
            if link.rank is None and link.socket in self._links and (number < excess or link.began < latest):
                self._drop(link)

    def _read(self, link: "Link") -> None:
        messages = link.receive()
        if messages is None:
            self._drop(link)
            return
        for message in messages:
            if link.rank is None and message.get("token") != self.token:
                self._drop(link)  # a stranger
                return
            if link.rank is None:
                link.rank = message["rank"]
                if self._first is not None:
                    link.send({"first": asdict(self._first)})
            else:
                self._take(link, link.rank, message)
        if link.rank is None and len(link.rest) > MESSAGE_BYTES:
            self._drop(link)

    def _take(self, link: "Link", rank: int, message: dict[str, Any]) -> None:
        """Act upon a rank's message."""
        if "seen" in message:
            self._rank_0 = message["seen"] if rank == 0 else self._rank_0
            self.on_seen(rank, message["seen"])
            if self._rank_0 is not None:
                link.send({"seen": self._rank_0})
        elif "failed" in message:
            failure = Failure(**message["failed"])
            if failure.rank == rank:  # rank 0 tells of others that hang
                self.ending.add(rank)
            if self._reported is None:
                self._reported = failure
                self._decide_at = time.monotonic() + intervals.VERDICT_DELAY
        elif "ending" in message:
            self.ending.add(rank)
        elif "bye" in message:
            link.is_done = True
            self._num_farewells += 1
            self.on_farewell(rank)
        elif not RELAYED.isdisjoint(message):
            for other in self._links.values():
                if other.rank not in (None, rank):
                    other.send(message)

    def _drop(self, link: "Link") -> None:
        self._selector.unregister(link.socket)
        del self._links[link.socket]
        link.close()
        if link.rank is None or link.is_done:
            return
        if self._reported is not None and self._reported.rank == link.rank:
            self._decide(self._reported)
        else:
            # A broken connection is seen by others as an exception of theirs: the death comes first.
            self._decide(Failure(link.rank, self._cause_of_death(link.rank) if self._first is None else GONE))

    def _decide(self, failure: Failure) -> None:
        if self._first is None:
            self._first = failure
            self._on_first(failure)
            # Rank 0 last: this thread ends with it.
            for link in sorted(self._links.values(), key=lambda link: -(link.rank or 0)):
                if link.rank is not None:
                    link.send({"first": asdict(failure)})


class Link:
    """One end of a connection.

    Attributes:
        rank: whose it is, once that is known.
        began: when it was made, as time.monotonic() counts.
        is_done: whether the farewell was said.
        rest: of what has come, the beginning of a message.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.began = time.monotonic()
        self._lock = threading.Lock()
        self.rank: int | None = None
        self.is_done = False
        self.rest = b""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that loses its power closes nothing: found within a minute.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, message: dict[str, Any]) -> None:
        """Send, if the other end is still there; that it is not shows when reading."""
        with self._lock, contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Wait for something and return the messages that are complete; None when it is closed, or a stranger's."""
        try:
            data = self.socket.recv(MESSAGE_BYTES)
        except OSError:
            return None
        if not data:
            return None
        *lines, self.rest = (self.rest + data).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None

    def hang_up(self) -> None:
        """End the connection, and whatever waits for it."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def close(self) -> None:
        """Let go of the connection, which lives on if another process has a copy of this end."""
        self.socket.close()


def connect(addresses: list[str], port: int, timeout: float) -> Link:
    """Connect to the hub at the first of ``addresses`` that answers."""
    errors = []
    for address in addresses:
        try:
            connection = socket.create_connection((address, port), timeout=timeout)
        except OSError as error:
            errors.append(f"{address}: {error}")
            continue
        connection.settimeout(None)
        return Link(connection)
    raise ConnectionError(f"Rank 0's failure watch does not answer on port {port} ({'; '.join(errors)}).")
