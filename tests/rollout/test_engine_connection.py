"""The trainer's connection to an engine, without the engine: a peer at the other end of a socket pair."""

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from engine_models import bare_config
from waiting import PATIENCE_SECONDS

from rlightning import intervals, rpc
from rlightning.errors import EngineDiedError, EngineError, EngineStartError, RequestRefusedError
from rlightning.processes.liveness import Deadline
from rlightning.rollout import engine_connection
from rlightning.rollout.engine_connection import NAME, EngineConnection, ServedEngine
from rlightning.rollout.engine_facts import EngineFacts
from rlightning.rpc import BusyError, ConnectionLostError, Peer, background_loop, peer
from rlightning.rpc.authentication import authenticate_client
from rlightning.rpc.peer import Method

FOREVER = float("inf")


class ArgumentsRefusedError(ValueError):
    """As the engine's."""


class FakeEngine:
    """What an engine answers; it gives no heartbeat."""

    def __init__(self, end: socket.socket) -> None:
        self.calls: list[str] = []
        self.refusal: Exception | None = None
        methods: dict[str, Method] = {
            "start": self.start,
            "generate": self.answer,
            "ping": self.hang,
            "fail": self.fail,
        }
        methods |= {"receive_weights": self.answer}
        opened = Peer.open(
            end,
            methods,
            name="the trainer",
            heartbeat_timeout=FOREVER,
            heartbeat_interval=3600.0,
            check_alive=self.hang,
        )
        self.peer = background_loop().run(opened)

    async def start(self) -> dict[str, Any]:
        if self.refusal is not None:
            raise self.refusal
        return {"dtype": "float32"}

    async def answer(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "done"

    async def fail(self) -> None:
        raise KeyError("what is wrong")

    async def hang(self, *_: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.calls.append("cancelled")


class Connection(EngineConnection):
    """To it."""

    def __init__(self, end: socket.socket, **config: Any) -> None:
        super().__init__(bare_config(Path("engine.log"), **config))
        self._end_of_pair = end
        self._begin()

    @property
    def pid(self) -> int:
        return 0

    async def _connect(self) -> Peer:
        # Heartbeats of the trainer's are of no interest here, and its checks are frequent.
        timeout = self.config.start_timeout
        return await Peer.open(self._end_of_pair, {}, name=NAME, heartbeat_timeout=timeout, heartbeat_interval=0.02)

    async def _start(self, peer: Peer) -> EngineFacts:
        facts: EngineFacts = await peer.call("start")
        return facts

    async def _end(self, how: str) -> EngineError:
        return EngineDiedError(f"The engine {how}.")

    def _terminate(self) -> None:
        pass


@contextmanager
def connected(refusal: Exception | None = None, **config: Any) -> Iterator[tuple[Connection, FakeEngine]]:
    ours, theirs = socket.socketpair()
    engine = FakeEngine(theirs)
    engine.refusal = refusal
    connection = Connection(ours, **config)
    try:
        yield connection, engine
    finally:
        connection.close()
        background_loop().run(engine.peer.close())


def test_calls_wait_for_the_start_and_fail_alone() -> None:
    with connected() as (connection, engine):
        assert connection.submit("generate", 0.0).result(60) == "done"
        assert connection.ready.result(60) == {"dtype": "float32"}
        with pytest.raises(RequestRefusedError, match=r"^The engine refused a request: KeyError: 'what is wrong'\n"):
            connection.submit("fail").result(60)
        with pytest.raises(RequestRefusedError, match="there is no method 'steal'"):
            connection.submit("steal").result(60)
        doomed = connection.submit("ping")
        assert connection.submit("generate", 0.0).result(60) == "done"
        assert doomed.cancel()
        assert connection.submit("generate", 0.0).result(60) == "done"
        assert engine.calls == ["cancelled"], "before the later call"
        waiting = connection.submit("ping")
    with pytest.raises(EngineDiedError):
        waiting.result(60)
    with pytest.raises(EngineDiedError):
        connection.submit("ping").result(60)
    assert connection.ended.result(60) is connection.death


def test_silent_engine_counts_as_hung() -> None:
    with connected(hang_timeout=0.1) as (connection, _):
        connection.ready.result(60)
        with pytest.raises(EngineDiedError, match=r"The engine gave no heartbeat for 0\.1 s\."):
            connection.submit("ping").result(60)


@pytest.mark.long
@pytest.mark.parametrize(("timeout", "sent"), [(0.1, 0), (0.5, 1 << 22)], ids=["silent", "reads nothing"])
def test_engine_that_does_not_come_up_is_named(timeout: float, sent: int) -> None:
    ours, theirs = socket.socketpair()
    connection = Connection(ours, start_timeout=timeout)
    with pytest.raises(EngineDiedError, match=rf"The engine did not come up for {timeout} s\."):
        connection.submit("ping", bytes(sent)).result(60)
    connection.close()
    theirs.close()


@pytest.mark.long
def test_engine_that_only_samples_hangs_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "ENGINE_PROGRESS_TIMEOUT", 0.3)
    with connected(hang_timeout=3.0) as (connection, _):
        # It may have to compile something, and loading weights keeps its workers from answering: silent, it is alive.
        for method, seconds in (("generate", 0.8), ("receive_weights", 0.8), ("generate", 0.0)):
            assert connection.submit(method, seconds).result(60) == "done"
        with pytest.raises(EngineDiedError, match=r"gave no heartbeat for 0\.3 s"):  # not 3 s, as other calls have
            connection.submit("generate", 3600.0).result(60)


def test_end_of_the_connection_is_the_engines_death() -> None:
    with connected() as (connection, engine):
        connection.ready.result(60)
        answer = connection.submit("ping")
        background_loop().run(engine.peer.close())
        with pytest.raises(EngineDiedError, match=r"The engine died\."):
            answer.result(60)


def test_end_fails_more_calls_than_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "MAX_CALLS", 2)
    with connected() as (connection, engine):
        connection.ready.result(60)
        answers = [connection.submit("ping") for _ in range(10)]
        background_loop().run(engine.peer.close())
        assert not wait(answers, timeout=60).not_done
        assert {type(answer.exception()) for answer in answers} == {EngineDiedError}
        assert connection.ended.result(60) is connection.death


def test_call_that_does_not_fail_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "CANCEL_GRACE", 0.1)
    with connected() as (connection, _):
        connection.ready.result(60)
        held = background_loop().submit(asyncio.Event().wait())
        connection._calls.add(asyncio.wrap_future(held, loop=background_loop().loop))
    assert connection.ended.result(60) is connection.death
    held.cancel()


def test_refused_arguments_are_a_line() -> None:
    with (
        connected(ArgumentsRefusedError("dtype: no")) as (connection, _),
        pytest.raises(EngineStartError, match=r"^vLLM refuses the engine's arguments, .*: dtype: no$"),
    ):
        connection.ready.result(60)


def test_suspended_trainer_does_not_count_as_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(hang_timeout=30.0) as (connection, _):
        connection.ready.result(60)
        clock = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: clock() + 86400)  # a day passes
        assert connection.submit("generate", 0.2).result(60) == "done"
        monkeypatch.undo()


# An engine that others have started


@contextmanager
def served_at(port: int, **config: Any) -> Iterator[ServedEngine]:
    engine = ServedEngine(bare_config(Path("engine.log"), url=f"tcp://127.0.0.1:{port}", **config))
    try:
        yield engine
    finally:
        engine.close()


def keep_trying(monkeypatch: pytest.MonkeyPatch, on_failure: Callable[[ConnectionLostError], bool]) -> None:
    """Have the deadline for a connection over when its time has passed and ``on_failure`` was true of the last try.

    A busy machine may take the time of any try.
    """
    is_last = False

    class AfterTries(Deadline):
        @property
        def is_over(self) -> bool:
            return is_last and super().is_over

    async def connect(*arguments: Any, **options: Any) -> Peer:
        nonlocal is_last
        try:
            return await rpc.connect(*arguments, **options)
        except ConnectionLostError as error:
            is_last = on_failure(error)
            raise

    monkeypatch.setattr(engine_connection, "Deadline", AfterTries)
    monkeypatch.setattr(engine_connection, "connect", connect)


@pytest.mark.long
def test_unreachable_engine_raises_clear_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_trying(monkeypatch, lambda error: "refused" in str(error))
    with socket.socket() as bound:  # which refuses connections, and whose port no other process gets
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        message = (
            rf"tcp://127\.0\.0\.1:{port} could not be reached for 1 s: it cannot be reached: .*refused\. "
            r"Start it with .rlightning serve"
        )
        with served_at(port, start_timeout=1.0) as engine, pytest.raises(EngineError, match=message):
            engine.ready.result(60)


@pytest.mark.long
def test_earlier_refusal_is_reported_when_engine_stops_responding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has a trainer, and then answers nothing: the first is said."""
    # The try that is refused has all the time of a busy machine, the one after it little.
    for name in ("CONNECT_TIMEOUT", "RECONNECT_INTERVAL"):
        monkeypatch.setattr(intervals, name, PATIENCE_SECONDS)

    def shorten(error: ConnectionLostError) -> bool:
        monkeypatch.setattr(intervals, "CONNECT_TIMEOUT", 0.2)
        return not isinstance(error, BusyError)

    keep_trying(monkeypatch, shorten)

    async def refuse(listener: socket.socket) -> None:
        end, _ = await asyncio.get_running_loop().sock_accept(listener)
        with end, suppress(BusyError):
            end.setblocking(False)
            await authenticate_client(end, None, lambda: False)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        refusal = background_loop().submit(refuse(listener))
        message = r"for 0\.1 s: it serves another trainer\. Start it"
        with (
            served_at(listener.getsockname()[1], start_timeout=0.1) as engine,
            pytest.raises(EngineError, match=message),
        ):
            engine.ready.result(60)
        refusal.result(60)


def test_waiting_for_an_engine_can_be_ended() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with served_at(listener.getsockname()[1]) as engine:
            answer = engine.submit("ping")
        with pytest.raises(EngineDiedError, match="has been closed"):
            answer.result(60)
