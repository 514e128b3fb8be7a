"""Clients over TCP: who is served, what strangers cost, and calls from a thread without an event loop."""

import asyncio
import contextlib
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from waiting import in_event_loop

from rlightning import intervals
from rlightning.rpc import (
    AuthenticationError,
    BusyError,
    ConnectionLostError,
    DeadlineExceededError,
    Peer,
    Server,
    connect,
    listen,
)
from rlightning.rpc.authentication import MAGIC, WITH_KEY, make_url, parse_url
from rlightning.rpc.client import LoopThread, background_loop
from rlightning.rpc.peer import Method


async def add(a: int, b: int) -> int:
    return a + b


METHODS: dict[str, Method] = {"add": add}


@contextlib.asynccontextmanager
async def serving(key: bytes | None, **limits: int) -> AsyncIterator[str]:
    async def serve(end: socket.socket, client: str) -> None:
        peer = await Peer.open(end, METHODS, name=client)
        await asyncio.shield(peer.closed)

    listener = listen("127.0.0.1", 0)
    accepting = Server(listener, key, serve, **limits)
    try:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        await accepting.close()


async def call_once(url: str, key: bytes | None) -> Any:
    peer = await connect(url, key, {}, timeout=60)
    try:
        return await peer.call("add", 1, 2, timeout=60)
    finally:
        await peer.close()


@pytest.mark.parametrize("key", [b"secret", None])
@in_event_loop
async def test_client_with_the_key_is_served(key: bytes | None) -> None:
    async with serving(key) as url:
        assert await call_once(url, key) == 3


@pytest.mark.parametrize(
    ("served", "tried", "reason"),
    [
        (b"secret", b"another", "another key"),
        (b"secret", None, "asks for a key"),
        (None, b"secret", "has no key"),
    ],
)
@in_event_loop
async def test_client_without_the_key_is_refused(
    served: bytes | None, tried: bytes | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(served) as url:
        with pytest.raises(AuthenticationError, match=reason):
            await call_once(url, tried)
        assert await call_once(url, served) == 3
    assert "secret" not in caplog.text


@in_event_loop
async def test_client_refuses_server_without_the_key() -> None:
    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(MAGIC + WITH_KEY + bytes(32))
        await reader.readexactly(len(MAGIC) + 64)
        writer.write(b"w" + bytes(32))

    accepting = await asyncio.start_server(pretend, "127.0.0.1", 0)
    url = f"tcp://127.0.0.1:{accepting.sockets[0].getsockname()[1]}"
    with pytest.raises(AuthenticationError, match="another key"):
        await connect(url, b"secret", {}, timeout=60)
    accepting.close()


@in_event_loop
async def test_keyless_server_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.geteuid()
    async with serving(None) as url:
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)  # whose sockets belong to the user before
        with pytest.raises(AuthenticationError, match="belongs to another user, or is not on this host: both sides"):
            await call_once(url, None)


CLIENT = """
import asyncio, sys
from rlightning.rpc import connect
asyncio.run(connect(sys.argv[1], None, {}, timeout=60))
"""


@pytest.mark.processes
@pytest.mark.parametrize("is_other", [True, False])
@in_event_loop
async def test_keyless_server_refuses_another_user(is_other: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.geteuid()
    monkeypatch.setattr(intervals, "CONNECT_TIMEOUT", 60.0)
    async with serving(None) as url:
        monkeypatch.setattr(os, "geteuid", lambda: user + is_other)
        command = (sys.executable, "-c", CLIENT, url)
        client = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        _, errors = await client.communicate()
        told = "it belongs to another user, and has no key: both sides need one" in errors.decode()
        assert (told, client.returncode) == (is_other, int(is_other)), errors.decode()


@in_event_loop
async def test_client_beyond_the_limit_gets_busy() -> None:
    async with serving(b"secret", max_clients=1) as url:
        first = await connect(url, b"secret", {}, timeout=60)
        with pytest.raises(BusyError):
            await connect(url, b"secret", {}, timeout=60)
        with pytest.raises(AuthenticationError, match="another key"):
            await connect(url, b"wrong", {}, timeout=60)
        await first.close()
        while True:
            with contextlib.suppress(BusyError):
                assert await call_once(url, b"secret") == 3
                return


def test_calls_work_on_the_event_loop_of_uvloop() -> None:
    """Ray's workers make it the default."""
    uvloop = pytest.importorskip("uvloop")

    async def run() -> Any:
        async with serving(b"secret") as url:
            return await call_once(url, b"secret")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(run()) == 3


@in_event_loop
async def test_silent_strangers_keep_no_client_out() -> None:
    async with serving(b"secret", max_unauthenticated=4) as url:
        strangers = [socket.create_connection(parse_url(url)) for _ in range(24)]
        for stranger in strangers[::2]:
            stranger.sendall(b"\x00" * 100)
        assert await call_once(url, b"secret") == 3
        for stranger in strangers:
            stranger.close()


@in_event_loop
async def test_client_that_never_answers_is_closed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(intervals, "CONNECT_TIMEOUT", 0.05)

    async with serving(b"secret") as url:
        reader, writer = await asyncio.open_connection(*parse_url(url))
        assert len(await reader.read()) == len(MAGIC) + 1 + 32, "the greeting, and the end"
        writer.close()
    assert "it did not answer" in caplog.text


def test_server_that_is_not_there_is_named() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen: the port is no other program's meanwhile
        url = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConnectionLostError, match=url):
            asyncio.run(connect(url, None, {}, timeout=60))


@pytest.mark.parametrize("url", ["http://host:1", "tcp://host", "tcp://:8100", "tcp://host:port", "tcp://host:1/path"])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"is no address. Write tcp://host:8100"):
        parse_url(url)


@pytest.mark.parametrize("host", ["10.0.0.1", "::1", "trainer.example"])
def test_made_url_is_parsed_to_host_and_port(host: str) -> None:
    assert parse_url(make_url(host, 8100)) == (host, 8100)


def test_loop_outlives_exits_and_fails_pending_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intervals, "CANCEL_GRACE", 0.1)

    async def leave() -> None:
        raise SystemExit(3)

    async def ignore() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)

    thread = LoopThread("leaving")
    with pytest.raises(SystemExit):
        thread.run(leave(), timeout=60)
    assert thread.run(add(1, 2), timeout=60) == 3
    future = thread.submit(ignore())
    thread.call(int)  # the other has begun
    thread.close()
    with pytest.raises(RuntimeError, match="'leaving' has ended"):
        future.result(60)


def test_thread_without_a_loop_calls_with_a_deadline() -> None:
    thread = LoopThread("test loop")
    has_begun, is_cancelled = threading.Event(), threading.Event()

    async def hold() -> None:
        has_begun.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            is_cancelled.set()
            raise

    async def fail() -> None:
        raise TimeoutError("its own")

    assert thread.run(add(1, 2), timeout=60) == 3
    while not has_begun.is_set():  # a busy machine's deadline may be over before
        with pytest.raises(DeadlineExceededError):
            thread.run(hold(), timeout=0.05)
    assert is_cancelled.wait(60)
    with pytest.raises(TimeoutError, match="its own"):
        thread.run(fail(), timeout=60)
    has_begun.clear()
    is_cancelled.clear()
    future = thread.submit(hold())
    assert has_begun.wait(60)
    thread.close()
    thread.close()
    assert is_cancelled.is_set() and future.cancelled()
    assert background_loop() is background_loop() and background_loop().run(add(2, 2)) == 4
