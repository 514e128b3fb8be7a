"""Serves one engine to trainers on other hosts, one after the other (``rlightning serve``).

::

    trainer                     rlightning serve                     engine process
      ServedEngine  ---tcp--->    EngineService ---> EngineProcess --->  VLLMServer

The engine outlives its trainers. If it dies, the trainer's connection ends, the engine is restarted, and the trainer
reconnects. An engine that dies repeatedly before it has sampled anything ends the service.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from rlightning import intervals, rpc
from rlightning.errors import ConfigError, EngineError
from rlightning.processes.liveness import RestartPolicy
from rlightning.rollout.engine_config import EngineConfig
from rlightning.rollout.engine_connection import METHODS, SAMPLING_METHODS
from rlightning.rollout.engine_facts import EngineFacts
from rlightning.rollout.vllm.launcher import EngineProcess

log = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""Maximum number of restarts of an engine that has not completed a sampling request."""


class Client:
    """The server's side of one trainer's connection: forwards the trainer's calls to the engine.

    Args:
        engine: an engine that is up.
        restarts: the engine's restart budget, which is reset when the engine has sampled.
    """

    def __init__(self, engine: EngineProcess, restarts: RestartPolicy) -> None:
        self.engine, self._restarts = engine, restarts
        self._unfinished: set[asyncio.Future[Any]] = set()

    async def serve(self, end: socket.socket, address: str) -> None:
        """Serve until the trainer disconnects or the engine dies, and calls that must not be interrupted are done."""
        methods = {name: partial(self._forward, name) for name in METHODS}
        peer = await rpc.Peer.open(
            end,
            {**methods, "describe": self._describe},
            name=f"the trainer at {address}",
            heartbeat_timeout=float("inf"),  # a suspended trainer stays connected
            check_alive=self._ping,
        )
        ended = asyncio.wrap_future(self.engine.ended)
        either: list[asyncio.Future[Any]] = [peer.closed, ended]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if ended.done() and not peer.closed.done():
                await peer.notify("engine_ended", ended.result().line)
        except rpc.ConnectionLostError:
            pass
        finally:
            await peer.close()
            if self._unfinished:
                await asyncio.wait(self._unfinished)

    async def _describe(self) -> EngineFacts:
        await self._ping()  # returns once the engine is up
        return self.engine.ready.result()

    async def _ping(self) -> None:
        await self._forward("ping")

    async def _forward(self, method: str, *arguments: object) -> object:
        """Call the engine. If the trainer disconnects, sampling is cancelled; other calls run to their end."""
        call = asyncio.ensure_future(self.engine.call(method, *arguments))
        if method not in SAMPLING_METHODS:
            self._unfinished.add(call)
            call.add_done_callback(self._unfinished.discard)
        try:
            result = await (call if method in SAMPLING_METHODS else asyncio.shield(call))
            if method == "generate":
                self._restarts.reset()
            return pack_arrays(result)
        except EngineError:
            if self.engine.death is None:
                raise
            # The trainer gets the error.
            return await asyncio.Event().wait()


class EngineService:
    """Keeps an engine running, and serves one trainer at a time.

    Args:
        config: configuration of the engine.
        listener: socket to which trainers connect, from :func:`open_listener`.
        key: key that trainers must have; None to serve all trainers of this user on this host.
    """

    def __init__(self, config: EngineConfig, listener: socket.socket, key: bytes | None) -> None:
        self.config = config
        self._listener, self._key = listener, key
        self._engine: EngineProcess | None = None
        self._restarts = RestartPolicy(MAX_RESTARTS)

    def run(self, on_ready: Callable[[], None]) -> None:
        """Serve until this thread is interrupted; call ``on_ready`` when the engine is up for the first time.

        Raises:
            EngineError: the engine could not start, or has exhausted its restarts.
        """
        try:
            rpc.background_loop().run(self._serve(on_ready))
        finally:
            if self._engine is not None:
                self._engine.close()

    async def _serve(self, on_ready: Callable[[], None]) -> None:
        engine = await self._start()
        server = rpc.Server(self._listener, self._key, self._serve_trainer, max_clients=1)
        try:
            on_ready()
            while True:
                death = await asyncio.shield(asyncio.wrap_future(engine.ended))
                if not self._restarts.take():
                    raise EngineError(
                        f"The engine has died {MAX_RESTARTS + 1} times without having sampled in between, and is not "
                        f"started again. {death.line}",
                        death.details,
                    )
                log.warning("The engine is started again: %s", death.line)
                engine = await self._start()
        finally:
            await server.close()

    async def _start(self) -> EngineProcess:
        """Start a new engine, and return it once it is up."""
        self._engine = EngineProcess(self.config)
        await asyncio.shield(asyncio.wrap_future(self._engine.ready))
        return self._engine

    async def _serve_trainer(self, end: socket.socket, address: str) -> None:
        while (engine := self._engine) is None or engine.death is not None:
            await asyncio.sleep(intervals.SHORT_POLL_INTERVAL)
        log.info("The trainer at %s has connected.", address)
        await Client(engine, self._restarts).serve(end, address)
        log.info("The trainer at %s has disconnected.", address)


def open_listener(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 stands for any free port."""
    try:
        return rpc.listen(host, port)
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: nothing can listen there ({error}).") from error


def pack_arrays(value: object) -> object:
    """Return an engine's result with each memoryview replaced by an RPC buffer, which keeps its dtype in transport."""
    if isinstance(value, memoryview):
        return rpc.Buffer(value)
    if isinstance(value, list):
        return [pack_arrays(one) for one in value]
    if isinstance(value, dict):
        return {name: pack_arrays(one) for name, one in value.items()}
    return value
