"""Messages over a stream: msgpack in length-prefixed frames, followed by buffers, of which large ones are not copied.

::

    frame:  body bytes (u32) | number of buffers (u32) | bytes of each buffer (u64 each) | body | buffer | buffer | ...

Plain data is None, booleans, numbers, text, bytes, and lists and dictionaries of these; tuples arrive as lists. Arrays
(``array.array``, NumPy's, and objects in a :class:`Buffer`) are sent as buffers and arrive as a ``memoryview`` of the
same format and shape, which ``numpy.frombuffer`` reads without a copy. Nothing is pickled. Both sides must be
little-endian.
"""

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, cast

import msgpack

MAX_BODY_BYTES = 256 << 20
"""Maximum bytes of a message without its buffers; a batch's text and numbers take far less."""
MAX_BUFFERS = 1 << 16
MAX_BUFFER_BYTES = 64 << 30
"""Maximum bytes of all buffers of a message together."""
WRITE_BUFFER_BYTES = 1 << 20
"""Bytes in a connection's write buffer above which a sender waits until the receiver has read some.

A message of at most this size with all its buffers is joined by a copy and written at once, if nothing is waiting.
"""
JOINED_BYTES = 1 << 16
"""Bytes up to which a part of a message that is written in pieces is joined with others by a copy.

A copy of so few bytes takes less than a system call for each part.
"""
SCRATCH_BYTES = 1 << 18
"""Size of the buffer for reading; longer data is read directly into its own memory."""
FRAME_BYTES = 4096
"""Initial allocation for writing a message's body, in bytes."""
BUFFER_CODE = 1
"""Code of msgpack's extension type for a buffer, whose data is the buffer's index, format and shape."""
FORMATS = frozenset("bBhHiIlLqQfd?")
"""Supported formats of an array's elements; other arrays have to be viewed as one of them."""
KEEPALIVE = {
    socket.TCP_KEEPIDLE: 10,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 4,
    socket.TCP_USER_TIMEOUT: 60_000,
}
"""TCP keepalive: a lost host is detected after half a minute, or after a minute if data to it is unacknowledged."""

_HEADER = struct.Struct("<II")


class RPCError(Exception):
    """Base of the errors of calls; the class says what the cause is."""


class ConnectionLostError(RPCError, ConnectionError):
    """The remote side ended, closed the connection, or sent no heartbeat. Pending calls fail with this error."""


class MessageError(ConnectionLostError):
    """The remote side sent an invalid message, or one above the size limits."""


class _Array(Protocol):
    """An object with a memory buffer: bytes, ``array.array``, a NumPy array."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


class Buffer:
    """A buffer that is sent after the message's frame instead of being encoded in it.

    In a message of more than ``WRITE_BUFFER_BYTES`` a buffer of more than ``JOINED_BYTES`` is sent from its own memory.
    In a smaller message buffers are joined with the frame by a copy, unless the connection's write buffer is full.

    Args:
        data: contiguous buffer, which must not change before the message is sent.
    """

    def __init__(self, data: _Array) -> None:
        self.view = memoryview(data)


def encode(message: object) -> tuple[bytes, list[memoryview]]:
    """Return a message's frame and, separately, its buffers as bytes.

    Raises:
        TypeError: the message contains something other than plain data.
        ValueError: the message is too large.
    """
    buffers: list[memoryview] = []

    def pack_buffer(value: Buffer | _Array) -> object:
        try:
            view = value.view if isinstance(value, Buffer) else memoryview(value)
        except TypeError:
            raise TypeError(f"A message holds plain data and arrays only, not {type(value).__name__}.") from None
        if view.format not in FORMATS or not view.c_contiguous:
            raise TypeError(f"An array in a message must be contiguous and of one of {sorted(FORMATS)}: {view.format}.")
        if view.ndim == 0:  # NumPy's numbers
            return view[()]
        buffers.append(view.cast("B") if view.nbytes else memoryview(b""))
        return msgpack.ExtType(BUFFER_CODE, msgpack.packb([len(buffers) - 1, view.format, view.shape]))

    body: bytes = msgpack.packb(message, default=pack_buffer, unicode_errors="surrogatepass", buf_size=FRAME_BYTES)
    sizes = [buffer.nbytes for buffer in buffers]
    _check_sizes(len(body), sizes, ValueError)
    return b"".join((_HEADER.pack(len(body), len(sizes)), struct.pack(f"<{len(sizes)}Q", *sizes), body)), buffers


def decode(body: "bytes | memoryview", buffers: list[bytearray]) -> object:
    """Return the message in a frame's body and buffers.

    Raises:
        MessageError: the frame is invalid.
    """

    def find_buffer(code: int, data: bytes) -> memoryview:
        if code != BUFFER_CODE:
            raise ValueError(f"extension type {code}")
        index, element, shape = msgpack.unpackb(data)
        view = memoryview(buffers[index])
        return view.cast(element, shape=shape) if view.nbytes else view.cast(element)

    try:
        return msgpack.unpackb(body, ext_hook=find_buffer, strict_map_key=False, unicode_errors="surrogatepass")
    except (ValueError, TypeError, IndexError, RecursionError) as error:
        raise MessageError(f"it sent what is no message ({error})") from error


class Connection(asyncio.BufferedProtocol):
    """Sends messages over a socket, and calls ``on_message`` with each message that arrives.

    Args:
        on_closed: called once with the error when the connection has ended.

    Attributes:
        num_received, num_sent: bytes received and sent so far.
    """

    def __init__(self, on_message: Callable[[object], None], on_closed: Callable[[ConnectionLostError], None]) -> None:
        self.num_received = self.num_sent = 0
        self._on_message, self._on_closed = on_message, on_closed
        self._transport: asyncio.Transport
        self._socket: socket.socket
        self._error: ConnectionLostError | None = None
        self._send_lock, self._num_waiting = asyncio.Lock(), 0
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._expect_header()

    @classmethod
    async def open(
        cls, end: socket.socket, on_message: Callable[[object], None], on_closed: Callable[[ConnectionLostError], None]
    ) -> "Connection":
        """Return a connection over a connected stream socket; closing the connection closes the socket."""
        end.setblocking(False)
        if end.family != socket.AF_UNIX:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE.items():
                end.setsockopt(socket.IPPROTO_TCP, option, value)
        connection = cls(on_message, on_closed)
        connection._socket = end
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=end)
        return connection

    @property
    def is_writable(self) -> bool:
        """Whether a small message would be sent without waiting."""
        return self._may_write.is_set() and not self._num_waiting

    async def send(self, message: object) -> None:
        """Send a message; return when it has been written, or fits into the write buffer.

        The message is sent even if this call is cancelled.

        Raises:
            ConnectionLostError: the connection has ended.
            TypeError, ValueError, OverflowError: the message cannot be sent; see :func:`encode`.
        """
        frame, buffers = encode(message)
        num_bytes = len(frame) + sum(map(len, buffers))
        if self.is_writable and (not buffers or num_bytes <= WRITE_BUFFER_BYTES):
            # Not in a task, whose first step would come after those of all tasks that can run now.
            self._write(b"".join((frame, *buffers)))
        else:
            self._num_waiting += 1  # later messages must not overtake it
            await asyncio.shield(self._write_in_turn(frame, buffers))

    async def _write_in_turn(self, frame: bytes, buffers: Sequence[memoryview]) -> None:
        try:
            async with self._send_lock:
                for piece in _split(memoryview(frame), *buffers):
                    await self._may_write.wait()
                    self._write(piece)
        finally:
            self._num_waiting -= 1

    def close(self, error: ConnectionLostError | None = None) -> None:
        """Close the connection after all messages have been sent; with an error, immediately."""
        self._error = self._error or error
        if error is None:
            self._transport.close()
        else:
            self._transport.abort()

    def close_copy(self) -> None:
        """In a forked child, close its copy of the socket, which would keep the connection open without the parent."""
        self._socket.close()

    def _write(self, data: "bytes | memoryview") -> None:
        if self._transport.is_closing():
            raise self._error or ConnectionLostError("the connection is closed")
        self.num_sent += len(data)
        self._transport.write(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio once the transport exists."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio at the end of the connection."""
        self._may_write.set()  # wakes writers, which then find the connection closed
        if self._error is None:
            self._error = ConnectionLostError(f"the connection broke: {exc}" if exc else "it closed the connection")
        self._on_closed(self._error)

    def pause_writing(self) -> None:
        """Called by asyncio when the write buffer is full."""
        self._may_write.clear()

    def resume_writing(self) -> None:
        """Called by asyncio when the write buffer has room again."""
        self._may_write.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for the next bytes: the frame's own buffer if the frame is large."""
        rest = self._target[self._num_filled :]
        self._is_direct = len(rest) >= SCRATCH_BYTES
        return rest if self._is_direct else self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        """Parse the bytes that asyncio has read into the memory of :meth:`get_buffer`."""
        self.num_received += nbytes
        if self._is_direct:
            self._num_filled += nbytes
            self._advance()
            return
        data = self._scratch[:nbytes]
        while len(data) and not self._transport.is_closing():
            taken = min(len(data), len(self._target) - self._num_filled)
            self._target[self._num_filled : self._num_filled + taken] = data[:taken]
            self._num_filled += taken
            data = data[taken:]
            self._advance()

    # Reading: one piece of a frame after the other, each of a known length.

    def _expect(self, memory: bytearray, then: Callable[[], None]) -> None:
        self._target, self._num_filled, self._then = memoryview(memory), 0, then

    def _expect_header(self) -> None:
        self._expect(bytearray(_HEADER.size), self._read_header)

    def _advance(self) -> None:
        try:
            while self._num_filled == len(self._target) and not self._transport.is_closing():
                self._then()
        except MessageError as error:
            self.close(error)

    def _read_header(self) -> None:
        num_bytes, num_buffers = _HEADER.unpack(self._target)
        _check_sizes(num_bytes, [0] * min(num_buffers, MAX_BUFFERS + 1), MessageError)
        self._num_buffers = num_buffers
        self._expect(bytearray(8 * num_buffers + num_bytes), self._read_body)

    def _read_body(self) -> None:
        num_buffers = self._num_buffers
        sizes = struct.unpack_from(f"<{num_buffers}Q", self._target)
        self._body = self._target[8 * num_buffers :]
        _check_sizes(len(self._body), sizes, MessageError)
        try:
            self._buffers = [bytearray(size) for size in sizes]
        except MemoryError as error:
            raise MessageError(f"it sent a message of {sum(sizes)} bytes, for which there is no memory") from error
        self._num_read = 0
        self._read_buffer()

    def _read_buffer(self) -> None:
        if self._num_read == len(self._buffers):
            body, buffers = self._body, self._buffers
            self._buffers = []
            self._expect_header()
            self._on_message(decode(body, buffers))
        else:
            self._num_read += 1
            self._expect(self._buffers[self._num_read - 1], self._read_buffer)


def _split(*parts: memoryview) -> "Iterator[bytes | memoryview]":
    """Yield the parts of a message in pieces of at most ``WRITE_BUFFER_BYTES``: what is unsent of a piece is copied.

    Small parts are joined to one piece.
    """
    small: list[memoryview] = []
    num_small = 0
    for part in parts:
        is_small = len(part) <= JOINED_BYTES
        if small and not (is_small and num_small + len(part) <= WRITE_BUFFER_BYTES):
            yield b"".join(small)
            small, num_small = [], 0
        if is_small:
            small.append(part)
            num_small += len(part)
        else:
            yield from (part[start : start + WRITE_BUFFER_BYTES] for start in range(0, len(part), WRITE_BUFFER_BYTES))
    if small:
        yield b"".join(small)


def _check_sizes(num_bytes: int, sizes: "list[int] | tuple[int, ...]", error: type[Exception]) -> None:
    """Raise an exception of class ``error`` if a frame exceeds the size limits."""
    if num_bytes > MAX_BODY_BYTES or len(sizes) > MAX_BUFFERS or sum(sizes) > MAX_BUFFER_BYTES:
        raise error(
            f"a message of {num_bytes} bytes and {len(sizes)} buffers of {sum(sizes)} bytes is beyond the limits of "
            f"{MAX_BODY_BYTES}, {MAX_BUFFERS} and {MAX_BUFFER_BYTES}"
        )
