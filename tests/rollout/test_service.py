"""The budget of restarts of a served engine, with an engine that a test lets die."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, cast

import pytest
from waiting import PATIENCE_SECONDS, wait_for

from rlightning import rpc
from rlightning.errors import EngineDiedError, EngineError, RequestRefusedError
from rlightning.rollout import service
from rlightning.rollout.engine_config import EngineConfig
from rlightning.rollout.service import MAX_RESTARTS, EngineService


class MortalEngine:
    """Stands for an engine's process; up at once."""

    def __init__(self, config: object) -> None:
        self.death: EngineError | None = None
        self.ready: Future[dict[str, Any]] = Future()
        self.ended: Future[EngineError] = Future()
        self.ready.set_result({})
        started.append(self)

    async def call(self, method: str, *arguments: object) -> str:
        if arguments:
            raise RequestRefusedError("no such argument")
        return method

    def die(self) -> None:
        self.death = EngineDiedError("The engine died (SIGKILL).", "The end of its log.")
        self.ended.set_result(self.death)

    def close(self) -> None:
        pass


started: list[MortalEngine] = []


class Service:
    """A service in a thread of its own.

    Attributes:
        result: done when it has ended.
        num_announced: how often it has said that the engine is up.
    """

    def __init__(self, listener: socket.socket) -> None:
        self.port, self.num_announced = listener.getsockname()[1], 0
        self.result: Future[None] = Future()
        self._service = EngineService(cast(EngineConfig, None), listener, None)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._service.run(self._announce)
            self.result.set_result(None)
        except EngineError as error:
            self.result.set_exception(error)

    def _announce(self) -> None:
        self.num_announced += 1

    def ask(self, method: str, *arguments: object) -> object:
        """Return the answer to a trainer that then disconnects."""

        async def connect() -> rpc.Peer:
            url = f"tcp://127.0.0.1:{self.port}"
            while True:
                with contextlib.suppress(rpc.BusyError):  # it has not noticed yet that the last one is gone
                    return await rpc.connect(
                        url, None, {}, timeout=PATIENCE_SECONDS, heartbeat_timeout=PATIENCE_SECONDS
                    )
                await asyncio.sleep(0.01)

        async def ask() -> object:
            peer = await connect()
            try:
                return await peer.call(method, *arguments)
            finally:
                await peer.close()

        return rpc.background_loop().run(ask())

    def kill(self) -> None:
        """Let the engine die, and wait for the next one or the end."""
        number = len(started)
        started[-1].die()
        wait_for(lambda: len(started) > number or self.result.done())


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(service, "EngineProcess", MortalEngine)
    started.clear()
    running = Service(rpc.listen("127.0.0.1", 0))
    wait_for(lambda: bool(started))
    yield running
    while not running.result.done():
        running.kill()


def test_engine_that_keeps_dying_ends_the_service(served: Service) -> None:
    for _ in range(MAX_RESTARTS + 1):
        assert served.ask("ping") == "ping"
        with pytest.raises(rpc.RemoteError):
            served.ask("generate", "nonsense")
        assert not served.result.done()
        served.kill()
    error = served.result.exception(PATIENCE_SECONDS)
    assert isinstance(error, EngineError) and error.details == "The end of its log."
    assert error.line == (
        "The engine has died 4 times without having sampled in between, and is not started again. "
        "The engine died (SIGKILL)."
    )
    assert len(started) == 1 + MAX_RESTARTS and served.num_announced == 1


def test_engine_that_samples_between_deaths_is_restarted(served: Service) -> None:
    for _ in range(MAX_RESTARTS + 2):
        assert served.ask("generate") == "generate"
        served.kill()
    assert len(started) == MAX_RESTARTS + 3 and not served.result.done()
