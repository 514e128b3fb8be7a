"""Sampling from the engines of other ranks: each rank relays requests of rank 0 to its engines.

::

    rank 0                              rank r                      engine process
      EnginePool --> RemoteEngine ---tcp---> EngineRelay ---> Engine --->  VLLMServer

An engine has one connection, to its own rank, which starts the engine, sends it weights, and reports how it died.
"""

import asyncio
import os
import socket
import time
from collections.abc import Sequence

from rlightning import intervals, rpc
from rlightning.errors import EngineDiedError, RequestRefusedError
from rlightning.parallel.collectives import gather_objects, global_rank
from rlightning.processes.liveness import Deadline
from rlightning.rollout.engine import Engine, EngineSampler
from rlightning.rollout.engine_pool import EngineId
from rlightning.rollout.model_files import ModelFiles
from rlightning.rollout.placement import COLLECTOR_RANK
from rlightning.rollout.service import pack_arrays
from rlightning.rollout.weights.rendezvous import find_own_address

MAX_CONNECTIONS = 4
"""Maximum number of rank 0's connections to a relay: one, and lost ones that are not detected yet."""


class EngineRelay:
    """Relays the requests of rank 0 to this rank's engines."""

    def __init__(self, engines: Sequence[Engine], host: str, key: bytes) -> None:
        self._engines, self._num_requests = engines, 0
        listener = rpc.listen(host, 0)
        self.url = rpc.make_url(host, listener.getsockname()[1])
        self._server = rpc.background_loop().call(rpc.Server, listener, key, self._serve, max_clients=MAX_CONNECTIONS)

    def wait_until_idle(self) -> None:
        """Wait briefly until no request is being relayed: rank 0 has cancelled the requests that it does not need."""
        deadline = Deadline(intervals.CANCEL_GRACE)
        while self._num_requests and not deadline.is_over:
            time.sleep(intervals.TRANSFER_POLL_INTERVAL)

    def close(self) -> None:
        """Disconnect rank 0."""
        rpc.background_loop().run(self._server.close())

    async def _serve(self, end: socket.socket, client: str) -> None:
        methods = {"request": self._request}
        peer = await rpc.Peer.open(end, methods, name=client, heartbeat_timeout=float("inf"))
        await peer.wait_closed()

    async def _request(self, number: int, method: str, *arguments: object) -> object:
        process = self._engines[number].process
        if process is None:
            raise EngineDiedError("The engine is not running.")
        self._num_requests += 1
        try:
            return pack_arrays(await process.call(method, *arguments))
        finally:
            self._num_requests -= 1


class RemoteEngine(EngineSampler):
    """An engine of another rank, as a sampler on rank 0."""

    def __init__(self, relay: "RelayConnection", engine_id: EngineId, files: ModelFiles) -> None:
        super().__init__()
        self._relay, self._id, self._files = relay, engine_id, files

    @property
    def files(self) -> ModelFiles:
        """Return the files of the model that the engine runs."""
        return self._files

    async def _request(self, method: str, *arguments: object) -> object:
        work = self._relay.request(self._id.number, method, *arguments)
        try:
            return await asyncio.wrap_future(rpc.background_loop().submit(work))
        except rpc.RemoteError as error:
            if error.type_name == EngineDiedError.__name__:
                raise EngineDiedError(error.message) from None
            raise RequestRefusedError(error.traceback or error.message) from None
        except rpc.ConnectionLostError as error:
            raise EngineDiedError(f"Rank {self._id.rank} cannot be reached: {error}") from None


class RelayConnection:
    """Rank 0's connection to the relay of another rank; reconnects if the connection was lost."""

    def __init__(self, url: str, key: bytes) -> None:
        self._url, self._key = url, key
        self._peer: rpc.Peer | None = None
        self._lock = asyncio.Lock()

    async def request(self, number: int, method: str, *arguments: object) -> object:
        """Call a method of engine ``number`` of the other rank, on the background event loop."""
        peer = await self.connect()
        return await peer.call("request", number, method, *arguments)

    async def connect(self) -> rpc.Peer:
        """Return the RPC peer of the other rank's relay, connecting if necessary; on the background event loop."""
        async with self._lock:
            if self._peer is None or self._peer.closed.done():
                self._peer = await rpc.connect(
                    self._url, self._key, {}, timeout=intervals.TRANSFER_TIMEOUT, heartbeat_timeout=float("inf")
                )
            return self._peer

    async def close(self) -> None:
        """Close the connection to the other rank's relay, if there is one."""
        if self._peer is not None:
            await self._peer.close()


class EngineNetwork:
    """Connects rank 0 to the engines of all ranks. Each rank creates one for its engines, and closes it with them.

    Attributes:
        engines: on rank 0 the engines of all ranks; empty on other ranks.
    """

    def __init__(self, engines: Sequence[Engine], files: ModelFiles) -> None:
        self.engines: dict[EngineId, EngineSampler] = {}
        self._relay: EngineRelay | None = None
        self._connections: list[RelayConnection] = []
        gathered = gather_objects((rpc.new_key(), socket.gethostname()), name="engines")
        key, hosts = gathered[COLLECTOR_RANK][0], {host for _, host in gathered}
        if engines and global_rank() != COLLECTOR_RANK:
            own = "127.0.0.1"
            if len(hosts) > 1:  # the address from which rank 0's host is reached; the port does not matter
                own = find_own_address(os.environ.get("MASTER_ADDR", own), 9)
            self._relay = EngineRelay(engines, own, key)
        relay = None if self._relay is None else (self._relay.url, len(engines))
        relays = gather_objects(relay, name="engines")
        if global_rank() != COLLECTOR_RANK:
            return
        self.engines |= {EngineId(COLLECTOR_RANK, number): engine for number, engine in enumerate(engines)}
        for rank, found in enumerate(relays):
            if found is not None:
                url, num_engines = found
                connection = RelayConnection(url, key)
                self._connections.append(connection)
                rpc.background_loop().run(connection.connect())
                ids = [EngineId(rank, number) for number in range(num_engines)]
                self.engines |= {engine_id: RemoteEngine(connection, engine_id, files) for engine_id in ids}

    def wait_until_idle(self) -> None:
        """Wait until this rank relays no request; called before the rank's engines sleep."""
        if self._relay is not None:
            self._relay.wait_until_idle()

    def close(self) -> None:
        """End the connections. May be called twice."""
        for connection in self._connections:
            rpc.background_loop().run(connection.close())
        self._connections.clear()
        if self._relay is not None:
            self._relay.close()
            self._relay = None
