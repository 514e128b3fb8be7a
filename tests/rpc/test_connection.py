"""Frames over a real socket pair: what arrives, what is refused, and what a sender waits for."""

import array
import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from waiting import in_event_loop

from rlightning.rpc.connection import (
    MAX_BODY_BYTES,
    WRITE_BUFFER_BYTES,
    Buffer,
    Connection,
    ConnectionLostError,
    MessageError,
)


class End:
    """One end of a socket pair, which keeps what arrives."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue()
        self.closed: asyncio.Future[ConnectionLostError] = asyncio.get_running_loop().create_future()

    async def open(self, end: socket.socket) -> "End":
        self.connection = await Connection.open(end, self.messages.put_nowait, self.closed.set_result)
        return self


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[End, End]]:
    ours, theirs = socket.socketpair()
    ends = await End().open(ours), await End().open(theirs)
    yield ends
    for end in ends:
        end.connection.close(ConnectionLostError("done"))
        await end.closed


async def exchange(message: Any) -> Any:
    async with connected() as (sender, receiver):
        await sender.connection.send(message)
        return await asyncio.wait_for(receiver.messages.get(), 60)


@pytest.mark.parametrize(
    ("sent", "arrives"),
    [
        (None, None),
        ([1, -(2**63), 2**64 - 1, 1.5, True], [1, -(2**63), 2**64 - 1, 1.5, True]),
        (("tuple", ["list"]), ["tuple", ["list"]]),
        ({"text": "ü \ud800", 3: b"\x00bytes"}, {"text": "ü \ud800", 3: b"\x00bytes"}),
        (np.int64(7), 7),
    ],
)
@in_event_loop
async def test_plain_data_arrives_as_it_was(sent: Any, arrives: Any) -> None:
    assert await exchange(sent) == arrives


@in_event_loop
async def test_arrays_keep_format_and_shape() -> None:
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    sent = [array.array("q", [1, 2, 3]), numbers, np.zeros(0, np.int32), Buffer(b"raw"), "between"]
    whole, matrix, empty, raw, text = await exchange(sent)
    assert (whole.format, whole.tolist()) == ("q", [1, 2, 3])
    assert (matrix.format, matrix.shape, matrix.tolist()) == ("f", (2, 3), [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
    assert (empty.format, empty.tolist()) == ("i", []) and bytes(raw) == b"raw" and text == "between"
    assert not matrix.readonly and np.frombuffer(matrix, np.float32).base is not None, "read without a copy"


@in_event_loop
async def test_many_messages_and_large_buffers_arrive_in_order() -> None:
    sizes = [0, 1, 100, 1 << 18, 3, (5 << 20) + 1, 1 << 16, 0, 9]
    async with connected() as (sender, receiver):
        messages = [[number, Buffer(bytes([number]) * size)] for number, size in enumerate(sizes)]
        sending = asyncio.gather(*(sender.connection.send(message) for message in messages))
        received = [await receiver.messages.get() for _ in sizes]
        await sending
    expected = [(number, size, number * len(range(0, size, 4096))) for number, size in enumerate(sizes)]
    assert [(number, len(data), sum(data[::4096])) for number, data in received] == expected


@pytest.mark.parametrize("value", [object(), {1, 2}, np.zeros((4, 4))[:, ::2], np.zeros(2, np.float16)])
def test_sender_refuses_what_is_not_plain(value: Any) -> None:
    with pytest.raises(TypeError, match=r"plain data|contiguous"):
        asyncio.run(exchange([value]))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (struct.pack("<II", MAX_BODY_BYTES + 1, 0), "beyond the limits"),
        (struct.pack("<II", 1, 1 << 31), "beyond the limits"),
        (struct.pack("<IIQ", 1, 1, 1 << 60) + b"\x00", "beyond the limits"),
        (struct.pack("<II", 1, 0) + b"\xc1", "no message"),
        (struct.pack("<II", 2, 0) + b"\x01\x01", "no message"),
        (struct.pack("<II", 6, 0) + b"\xc7\x03\x01\x93\x05\xa1", "no message"),
        (struct.pack("<II", 3, 0) + b"\xd4\x02\x00", "no message"),
    ],
)
@in_event_loop
async def test_malformed_frame_ends_the_connection(data: bytes, reason: str) -> None:
    ours, theirs = socket.socketpair()
    end = await End().open(ours)
    theirs.sendall(data)
    error = await end.closed
    assert not theirs.recv(1) and end.messages.empty()
    theirs.close()
    assert isinstance(error, MessageError) and reason in str(error)


def test_sender_waits_for_reader_or_end() -> None:
    async def run(read: Callable[[socket.socket], None]) -> Any:
        ours, theirs = socket.socketpair()
        end = await End().open(ours)
        sending = asyncio.ensure_future(end.connection.send(Buffer(bytes(64 * WRITE_BUFFER_BYTES))))
        done, _ = await asyncio.wait([sending], timeout=0.05)
        assert not done and end.connection.num_sent < 4 * WRITE_BUFFER_BYTES and not end.connection.is_writable
        await asyncio.get_running_loop().run_in_executor(None, read, theirs)
        result = (await asyncio.gather(sending, return_exceptions=True))[0]
        end.connection.close(ConnectionLostError("done"))
        await end.closed
        theirs.close()
        return result

    def read_all(end: socket.socket) -> None:
        left = 64 * WRITE_BUFFER_BYTES
        while left:
            left -= len(end.recv(left))

    assert asyncio.run(run(read_all)) is None
    assert isinstance(asyncio.run(run(lambda end: end.shutdown(socket.SHUT_RDWR))), ConnectionLostError)


@in_event_loop
async def test_cancelled_sender_leaves_whole_messages_behind() -> None:
    async with connected() as (sender, receiver):
        first = asyncio.ensure_future(sender.connection.send(Buffer(bytes(8 * WRITE_BUFFER_BYTES))))
        await asyncio.sleep(0)
        first.cancel()
        await sender.connection.send(Buffer(b"second"))
        sizes = [len(await receiver.messages.get()) for _ in range(2)]
    assert sizes == [8 * WRITE_BUFFER_BYTES, 6]
