"""Calls in both directions over a socket pair: results, errors, deadlines, cancellation, the end of the other end."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from waiting import in_event_loop, put_clock_forward

from rlightning.rpc import ConnectionLostError, DeadlineExceededError, Peer, RemoteError, peer
from rlightning.rpc.peer import Method


@contextlib.asynccontextmanager
async def connected(
    left: dict[str, Method], right: dict[str, Method] | None = None, **settings: Any
) -> AsyncIterator[tuple[Peer, Peer]]:
    """The peers at the two ends of a socket pair: what the first calls are the ``left`` methods."""
    ours, theirs = socket.socketpair()
    callee = await Peer.open(theirs, left, name="caller")
    caller = await Peer.open(ours, right or {}, name="callee", **settings)
    yield caller, callee
    await caller.close()
    await asyncio.wait_for(asyncio.shield(callee.closed), 60)


async def add(a: int, b: int) -> int:
    return a + b


async def fail(text: str) -> None:
    raise ValueError(text)


async def hold() -> None:
    await asyncio.sleep(3600)


async def give_object() -> Any:
    return object()


async def cancel_itself() -> None:
    raise asyncio.CancelledError


METHODS: dict[str, Method] = {
    "add": add,
    "fail": fail,
    "hold": hold,
    "give_object": give_object,
    "cancel_itself": cancel_itself,
}


@in_event_loop
async def test_calls_run_concurrently_and_answer_in_any_order() -> None:
    gate = asyncio.Event()

    async def wait(number: int) -> int:
        await gate.wait()
        return number

    async def open_gate() -> None:
        gate.set()

    async with connected({"wait": wait, "open_gate": open_gate, "add": add}) as (caller, _):
        waiting = [asyncio.ensure_future(caller.call("wait", number)) for number in range(3)]
        assert await caller.call("add", 1, 2) == 3
        await caller.notify("open_gate")
        assert await asyncio.gather(*waiting) == [0, 1, 2]


@in_event_loop
async def test_method_can_call_back_on_the_same_connection() -> None:
    async def run_task(number: int) -> int:
        return 10 * int(await callee.call("add", number, 1))

    async with connected({"run": run_task}, METHODS) as (caller, callee):
        assert await caller.call("run", 4) == 50


@pytest.mark.parametrize(
    ("method", "arguments", "type_name", "message"),
    [
        ("fail", ["no answer"], "ValueError", "no answer"),
        ("add", [1], "TypeError", "missing 1 required"),
        ("__class__", [], "LookupError", "no method '__class__'"),
        ("give_object", [], "TypeError", "plain data"),
        ("cancel_itself", [], "CancelledError", "cancelled"),
    ],
)
@in_event_loop
async def test_method_error_is_raised_at_caller(
    method: str, arguments: list[Any], type_name: str, message: str
) -> None:
    async with connected(METHODS) as (caller, _):
        with pytest.raises(RemoteError) as caught:
            await caller.call(method, *arguments)
        assert await caller.call("add", 1, 2) == 3, "the connection goes on"
    error = caught.value
    assert error.type_name == type_name and message in error.message and message in str(error)
    if method == "fail":
        assert "in fail" in error.traceback


@in_event_loop
async def test_unsendable_arguments_fail_and_free_place() -> None:
    async with connected(METHODS) as (caller, _):
        for _ in range(3):
            with pytest.raises(TypeError, match="plain data"):
                await caller.call("add", object(), 1)
        assert caller._slots._value == peer.MAX_CALLS and await caller.call("add", 1, 2) == 3


@pytest.mark.parametrize("by_deadline", [True, False])
@in_event_loop
async def test_end_of_a_wait_cancels_the_method(by_deadline: bool) -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        begun.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with connected({"hold": hold}) as (caller, callee):
        call = asyncio.ensure_future(caller.call("hold", timeout=60.0 if by_deadline else None))
        await begun.wait()
        if by_deadline:
            put_clock_forward(asyncio.get_running_loop(), 60.0)
        else:
            call.cancel()
        with pytest.raises(DeadlineExceededError if by_deadline else asyncio.CancelledError):
            await call
        await cancelled.wait()
        while caller._pending or callee._handlers:
            await asyncio.sleep(0.001)
        assert caller._slots._value == peer.MAX_CALLS


@in_event_loop
async def test_calls_beyond_the_limit_wait_for_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "MAX_CALLS", 2)
    num_running = most = 0

    async def count() -> None:
        nonlocal num_running, most
        num_running += 1
        most = max(most, num_running)
        await asyncio.sleep(0.001)
        num_running -= 1

    async with connected({"count": count, "hold": hold}) as (caller, _):
        await asyncio.gather(*(caller.call("count") for _ in range(20)))
        assert most == 2
        holding = [asyncio.ensure_future(caller.call("hold")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(DeadlineExceededError, match=r"'count' took more than 0\.05 s"):
            await caller.call("count", timeout=0.05)
        for call in holding:
            call.cancel()
        await caller.call("count", timeout=60)


@in_event_loop
async def test_connection_end_fails_calls_cancels_methods() -> None:
    ended = asyncio.Event()

    async def hold() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    ours, theirs = socket.socketpair()
    callee = await Peer.open(theirs, {"hold": hold}, name="caller")
    caller = await Peer.open(ours, {}, name="engine")
    call = asyncio.ensure_future(caller.call("hold"))
    while not callee._handlers:
        await asyncio.sleep(0.001)
    callee.abort("gone")
    with pytest.raises(ConnectionLostError, match=r"engine: it closed the connection|engine: the connection broke"):
        await call
    await asyncio.wait_for(ended.wait(), 60)
    with pytest.raises(ConnectionLostError, match="engine"):
        await caller.call("hold")
    with pytest.raises(ConnectionLostError):
        await caller.notify("hold")
    await caller.close()


@in_event_loop
async def test_connection_end_fails_calls_without_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "MAX_CALLS", 2)
    async with connected(METHODS) as (caller, callee):
        calls = [asyncio.ensure_future(caller.call("hold")) for _ in range(10)]
        while len(callee._handlers) < 2:
            await asyncio.sleep(0.001)
        calls.pop(5).cancel()
        caller.abort("gone")
        done, pending = await asyncio.wait(calls, timeout=60)
        assert not pending and {str(call.exception()) for call in done} == {"callee: gone"}
        assert caller._slots._value == 2 and not caller._pending


@in_event_loop
async def test_missing_heartbeats_end_the_connection() -> None:
    ours, theirs = socket.socketpair()  # the other end never says anything
    caller = await Peer.open(ours, {}, name="engine", heartbeat_interval=0.01, heartbeat_timeout=0.05)
    with pytest.raises(ConnectionLostError, match=r"engine: gave no heartbeat for 0\.05 s"):
        await caller.call("add", 1, 2)
    theirs.close()


@pytest.mark.long
@in_event_loop
async def test_heartbeats_stop_while_the_check_waits() -> None:
    is_well = asyncio.Event()
    is_well.set()

    async def check() -> None:
        await is_well.wait()

    ours, theirs = socket.socketpair()
    await Peer.open(theirs, {}, name="caller", heartbeat_interval=0.01, check_alive=check)
    caller = await Peer.open(ours, {}, name="engine", heartbeat_interval=0.02, heartbeat_timeout=0.5)
    await asyncio.sleep(1.0)
    assert not caller.closed.done(), "heartbeats came"
    is_well.clear()
    error = await asyncio.wait_for(caller.closed, 60)
    assert "gave no heartbeat" in str(error)


@in_event_loop
async def test_failed_notification_is_logged_where_it_failed(caplog: pytest.LogCaptureFixture) -> None:
    async with connected(METHODS) as (caller, _):
        await caller.notify("fail", "lost")
        assert await caller.call("add", 1, 2) == 3
    assert "the notification 'fail' failed" in caplog.text and "ValueError: lost" in caplog.text


@pytest.mark.parametrize("message", [[], 7, [0, 1], [1], [99], [2, 5, "x"], [0, "number", "add", []], None])
@in_event_loop
async def test_unknown_message_does_not_hang_connection(message: Any) -> None:
    async with connected(METHODS) as (caller, _):
        await caller._send(message)
        with contextlib.suppress(ConnectionLostError):
            assert await caller.call("add", 1, 2) == 3
        caller.abort("done")
