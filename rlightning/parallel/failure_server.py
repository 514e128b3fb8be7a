"""The server of the failure watch on rank 0, to which all ranks connect, and which decides which failure was the first.

The calls use :mod:`rlightning.rpc`. A connection that ends before its rank has left is a failure of that rank::

    rank -> rank 0    fail(rank, failure)              this rank has failed; rank 0 reports others that hang, too
                      clean_up(rank)                   this rank cleans up, because another rank failed
                      report(rank, status)             a heartbeat
                      relay(rank, method, argument)    call a method of all other ranks: record_stacks, kill
                      leave(rank)                      this rank ends without failure
    rank 0 -> rank    rank()                           called once for a new connection
                      end(failure)                     the first failure of all
                      report(status)                   the answer to a heartbeat: rank 0's status
"""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict

from rlightning import intervals
from rlightning.parallel.rank_failure import Failure
from rlightning.python_values import JsonObject
from rlightning.rpc import Peer, RPCError, Server, connect, make_url, new_key
from rlightning.rpc.peer import Method, ignore_lost
from rlightning.rpc.server import MAX_UNAUTHENTICATED

NO_TIMEOUT = float("inf")
"""Timeout of the transport's own heartbeats: none, since the hang watch detects a rank that does not run."""


class FailureServer:
    """The server on rank 0 to which all ranks report failures and heartbeats; it decides which failure was first.

    It sends the first failure to all ranks, which end then. Coroutines run on the event loop of the failure watch.

    Args:
        world_size: number of ranks that will connect, rank 0 included.
        on_first: called with the first failure before it is sent to the ranks.
        find_cause: returns how a disconnected rank has ended.
        on_report: called with a rank and its status.
        on_leave: called with a rank that ends without failure.

    Attributes:
        port: port on which the server listens, at all addresses of the host.
        key: key with which ranks authenticate.
        cleaning_up: ranks that have failed, or that clean up after another's failure.
        is_over: event, set when every rank has left.
    """

    def __init__(
        self,
        world_size: int,
        *,
        on_first: Callable[[Failure], None],
        find_cause: Callable[[int], Awaitable[str]],
        on_report: Callable[[int, JsonObject], None],
        on_leave: Callable[[int], None],
    ) -> None:
        self._ranks, self._left = range(world_size), set[int]()
        self._on_first, self._find_cause, self._on_report, self._on_leave = on_first, find_cause, on_report, on_leave
        self.key = new_key()
        self.cleaning_up, self.is_over = set[int](), threading.Event()
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=is_dual, backlog=socket.SOMAXCONN)
        self.port = int(self._listener.getsockname()[1])
        self._peers: dict[int, Peer] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._reported: Failure | None = None
        self._first: Failure | None = None
        self._is_decided = False
        self._own_status: JsonObject | None = None
        methods = (self.fail, self.clean_up, self.report, self.relay, self.leave)
        self._methods: dict[str, Method] = {method.__name__: method for method in methods}

    async def start(self) -> None:
        """Start to accept the ranks' connections; return without waiting for them."""
        self._server = Server(
            self._listener,
            self.key,
            self._serve,
            max_clients=len(self._ranks),
            max_unauthenticated=len(self._ranks) + MAX_UNAUTHENTICATED,
            timeout=intervals.JOIN_TIMEOUT,
        )

    async def close(self) -> None:
        """End all connections."""
        await self._server.close()

    def close_copies(self) -> None:
        """Close a forked child's copies of the connections, which would stay open after this process has ended."""
        self._listener.close()
        for peer in self._peers.values():
            peer.close_copy()

    # Methods that ranks call

    async def fail(self, rank: int, failure: JsonObject) -> None:
        """Receive a failed rank's report; after a short delay, send its failure to all ranks as the first one.

        If another rank is found dead in the meantime, its death is the first failure. Later reports only record that
        their rank cleans up.

        Args:
            rank: the rank that reports.
            failure: the :class:`Failure` as a dict; perhaps of another rank, which hangs.
        """
        found = Failure(**failure)
        if found.rank == rank:
            self.cleaning_up.add(rank)
        if self._reported is None:
            self._reported = found
            await asyncio.sleep(intervals.FAILURE_DECISION_DELAY)
            if self._is_first():
                self._announce(found)

    async def clean_up(self, rank: int) -> None:
        """Record that ``rank`` cleans up after another rank's failure, so that its exit does not count as a failure."""
        self.cleaning_up.add(rank)

    async def report(self, rank: int, status: JsonObject) -> None:
        """Receive a rank's heartbeat, pass its status to ``on_report``, and send rank 0's status to the rank."""
        if rank == 0:
            self._own_status = status
        self._on_report(rank, status)
        if self._own_status is not None:
            self._send([rank], "report", self._own_status)

    async def relay(self, rank: int, method: str, argument: object) -> None:
        """Call a method with an argument on all connected ranks, except ``rank``, which asked for it."""
        self._send(set(self._peers) - {rank}, method, argument)

    async def leave(self, rank: int) -> None:
        """Deregister a rank, so that its connection may close without being a failure."""
        self._left.add(rank)
        self._on_leave(rank)
        if len(self._left) == len(self._ranks):
            self.is_over.set()

    # Connections

    async def _serve(self, end: socket.socket, address: str) -> None:
        peer = await Peer.open(end, self._methods, name=address, heartbeat_timeout=NO_TIMEOUT)
        rank = await peer.call("rank", timeout=intervals.JOIN_TIMEOUT)
        self._peers[rank] = peer
        if self._first is not None:
            self._send([rank], "end", asdict(self._first))
        await peer.wait_closed()
        del self._peers[rank]
        if rank in self._left:
            return
        reported = self._reported
        if reported is not None and reported.rank == rank:
            if self._is_first():
                self._announce(reported)
        # Other ranks' connections to a dead rank close too, and may be reported first: a death is the first failure
        # immediately. A rank that has reported its own failure, such as a signal, even if not as the first, did not die
        # because of another.
        elif rank not in self.cleaning_up and self._is_first():
            self._announce(Failure(rank, await self._find_cause(rank)))

    def _is_first(self) -> bool:
        """Return whether no failure was reported before the caller's, which is then the first failure of all ranks."""
        is_first, self._is_decided = not self._is_decided, True
        return is_first

    def _announce(self, failure: Failure) -> None:
        self._first = failure
        self._on_first(failure)
        self._send(sorted(self._peers, reverse=True), "end", asdict(failure))  # rank 0 last: this loop ends with it

    def _send(self, ranks: Iterable[int], method: str, argument: object) -> None:
        """Call a method of some ranks without waiting, even if the caller's own connection ends meanwhile."""
        for rank in ranks:
            if rank in self._peers:
                task = asyncio.ensure_future(ignore_lost(self._peers[rank].notify(method, argument)))
                self._sending.add(task)
                task.add_done_callback(self._sending.discard)


async def connect_rank(addresses: Iterable[str], port: int, key: bytes, methods: Mapping[str, Method]) -> Peer:
    """Connect this rank to rank 0's server at the first of ``addresses`` that answers; return the connection.

    Args:
        addresses: host names or addresses of rank 0.
        port: the server's port.
        key: the server's key.
        methods: methods that the server may call, by name.

    Raises:
        ConnectionError: none of the addresses answers.
    """
    errors = []
    for address in addresses:
        try:
            return await connect(
                make_url(address, port),
                key,
                methods,
                timeout=intervals.JOIN_TIMEOUT,
                name="rank 0's failure watch",
                heartbeat_timeout=NO_TIMEOUT,
            )
        except RPCError as error:
            errors.append(str(error))
    raise ConnectionError(f"Rank 0's failure watch does not answer on port {port} ({'; '.join(errors)}).")
