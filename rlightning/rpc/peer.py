"""Calls in both directions over one connection."""

import asyncio
import contextlib
import logging
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from rlightning import intervals
from rlightning.processes.liveness import Heartbeat
from rlightning.rpc.connection import Connection, ConnectionLostError, RPCError

if TYPE_CHECKING:
    from typing import Unpack

T = TypeVar("T")

log = logging.getLogger(__name__)

CALL, RESULT, ERROR, CANCEL, NOTIFICATION, HEARTBEAT = range(6)
MAX_CALLS = 4096
"""Maximum number of concurrent calls in one direction: further callers wait, and above twice as many are refused."""

Method = Callable[..., Awaitable[Any]]


class DeadlineExceededError(RPCError, TimeoutError):
    """A call took longer than its timeout, and was cancelled."""


class RemoteError(RPCError):
    """The called method raised an exception on the remote side.

    Attributes:
        traceback: text with the frames of the remote side.
    """

    def __init__(self, type_name: str, message: str, traceback: str) -> None:
        super().__init__(f"{type_name}: {message}")
        self.type_name, self.message, self.traceback = type_name, message, traceback


class PeerSettings(TypedDict, total=False):
    """Optional keyword arguments of :class:`Peer`, where they are described."""

    name: str
    heartbeat_timeout: float
    heartbeat_interval: float
    check_alive: Callable[[], Awaitable[None]] | None


class Peer:
    """The remote side of a connection: its methods can be called, and it can call the methods passed here.

    Args:
        methods: methods by the names under which the remote side calls them. Each call runs as a task, which is
            cancelled if the caller cancels it or the connection ends.
        name: name of the remote side, for errors.
        heartbeat_timeout: seconds without a message after which the remote side counts as lost; may be changed later.
        heartbeat_interval: seconds between two heartbeats that this side sends.
        check_alive: awaited before each heartbeat, which is delayed until it returns.

    Attributes:
        closed: future of the error with which all further calls fail, done when the connection has ended.
    """

    def __init__(
        self,
        methods: Mapping[str, Method],
        *,
        name: str,
        heartbeat_timeout: float = intervals.SILENT_AFTER,
        heartbeat_interval: float = intervals.HEARTBEAT_INTERVAL,
        check_alive: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.name = name
        self.heartbeat_timeout = heartbeat_timeout
        self.heartbeat = Heartbeat(heartbeat_interval)
        self.closed: asyncio.Future[ConnectionLostError] = asyncio.get_running_loop().create_future()
        self._methods, self._check_alive = methods, check_alive
        self._connection: Connection
        self._slots = asyncio.Semaphore(MAX_CALLS)
        self._num_calls = 0
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._handlers: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(
        cls, end: socket.socket, methods: Mapping[str, Method], **settings: "Unpack[PeerSettings]"
    ) -> "Peer":
        """Return the peer at the remote side of a connected socket; ``settings`` are those of the class."""
        peer = cls(methods, **settings)
        peer._connection = await Connection.open(end, peer._receive, peer._end)
        peer._start(peer._send_heartbeats())
        peer._start(peer._watch())
        return peer

    async def call(self, method: str, *arguments: object, timeout: float | None = None) -> Any:
        """Call a method of the remote side and return its result. Cancelling this call cancels the method.

        Args:
            arguments: plain data; see :mod:`rlightning.rpc.connection`.
            timeout: seconds, including the wait if there are too many concurrent calls; None for no limit.

        Raises:
            RemoteError: the method raised an exception.
            DeadlineExceededError: the timeout has passed.
            ConnectionLostError: the connection has ended.
        """
        if timeout is None:
            return await self._call(method, arguments)
        try:
            return await limit(self._call(method, arguments), timeout)
        except TimeoutError:
            raise DeadlineExceededError(f"{self.name}: '{method}' took more than {timeout:g} s") from None

    async def notify(self, method: str, *arguments: object) -> None:
        """Call a method of the remote side without waiting; errors are logged on the remote side."""
        await self._send([NOTIFICATION, method, arguments])

    async def close(self) -> None:
        """Close the connection; pending calls fail, and running methods are cancelled."""
        self._connection.close()
        await asyncio.wait([self.closed], timeout=intervals.CANCEL_GRACE)
        if not self.closed.done():
            self.abort("it did not read before the connection was closed")
            await asyncio.wait([self.closed])
        await asyncio.gather(*self._tasks, *self._handlers.values(), return_exceptions=True)

    async def wait_closed(self) -> None:
        """Wait until the connection has ended."""
        await asyncio.wait([self.closed])

    def abort(self, reason: str) -> None:
        """Close the connection at once, even if the remote side does not read; pending calls fail with ``reason``."""
        self._connection.close(ConnectionLostError(f"{self.name}: {reason}"))

    def close_copy(self) -> None:
        """Close a forked child's copy of the connection, which stays open in this process's parent."""
        self._connection.close_copy()

    async def _call(self, method: str, arguments: tuple[object, ...]) -> object:
        await self._slots.acquire()
        self._num_calls += 1
        number = self._num_calls
        self._pending[number] = answer = asyncio.get_running_loop().create_future()
        try:
            if self.closed.done():  # perhaps while the call waited for a slot
                raise self.closed.result().with_traceback(None)
            await self._send([CALL, number, method, arguments])
            return await answer
        except asyncio.CancelledError:
            if number in self._pending:  # its slot is released when the other end confirms, or the connection ends
                self._start(self._send([CANCEL, number]))
            raise
        except Exception:
            self._pop_pending(number)
            raise

    def _pop_pending(self, number: int) -> "asyncio.Future[Any] | None":
        """Remove a call from the pending ones and release its slot; return its future, or None if it was removed."""
        answer = self._pending.pop(number, None)
        if answer is not None:
            self._slots.release()
        return answer

    async def _send(self, message: Sequence[object]) -> None:
        try:
            await self._connection.send(message)
        except ConnectionLostError as error:
            lost = self.closed.result() if self.closed.done() else error
            raise lost.with_traceback(None) from None  # many callers raise the same object

    def _start(self, work: Coroutine[object, object, None]) -> None:
        """Run a coroutine in a task that is cancelled when the connection ends."""
        task = asyncio.ensure_future(ignore_lost(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _receive(self, message: object) -> None:
        try:
            if not isinstance(message, list):
                raise TypeError(f"a {type(message).__name__}, not a list")
            kind, *fields = message
            if kind == CALL:
                self._begin(*fields)
            elif kind in (RESULT, ERROR):
                self._settle(kind, *fields)
            elif kind == CANCEL:
                handler = self._handlers.get(fields[0])
                if handler is not None:
                    handler.cancel()
            elif kind == NOTIFICATION:
                self._start(self._handle_notification(*fields))
        except (TypeError, ValueError) as error:
            self.abort(f"it sent what is no message ({error})")

    def _begin(self, number: int, method: str, arguments: list[object]) -> None:
        handler = asyncio.ensure_future(self._handle(number, method, arguments))
        self._handlers[number] = handler
        handler.add_done_callback(lambda _: self._handlers.pop(number, None))

    async def _handle(self, number: int, method: str, arguments: list[object]) -> None:
        reply: list[object]
        try:
            if len(self._handlers) > 2 * MAX_CALLS:
                raise RuntimeError(f"more than {2 * MAX_CALLS} calls are in flight")
            reply = [RESULT, number, await self._find(method)(*arguments)]
        except asyncio.CancelledError:
            if self.closed.done():
                raise
            reply = [ERROR, number, "CancelledError", "the call was cancelled", ""]
        except Exception as error:
            reply = _describe(number, error)
        with contextlib.suppress(ConnectionLostError):
            try:
                await self._send(reply)
            except (TypeError, ValueError, OverflowError) as error:  # the result is not plain data
                await self._send(_describe(number, error))

    async def _handle_notification(self, method: str, arguments: list[object]) -> None:
        try:
            await self._find(method)(*arguments)
        except ConnectionLostError:
            raise
        except Exception:
            log.exception("%s: the notification '%s' failed.", self.name, method)

    def _find(self, method: str) -> Method:
        if method not in self._methods:
            raise LookupError(f"there is no method '{method}'")
        return self._methods[method]

    def _settle(self, kind: int, number: int, *fields: object) -> None:
        answer = self._pop_pending(number)
        if answer is None or answer.done():  # the caller no longer waits
            return
        if kind == RESULT:
            answer.set_result(*fields)
        else:
            answer.set_exception(RemoteError(*map(str, fields)))

    async def _send_heartbeats(self) -> None:
        num_sent = -1
        while True:
            if self._check_alive is not None:
                await self._check_alive()
            if self._connection.num_sent == num_sent and self._connection.is_writable:
                await self._send([HEARTBEAT])
            num_sent = self._connection.num_sent
            await asyncio.sleep(self.heartbeat.interval)

    async def _watch(self) -> None:
        num_received = 0
        while self.heartbeat.silent_seconds <= self.heartbeat_timeout:
            await asyncio.sleep(min(self.heartbeat.interval, self.heartbeat_timeout))
            self.heartbeat.tick()
            if self._connection.num_received != num_received:  # a part of a large message is a sign, too
                self.heartbeat.beat()
            num_received = self._connection.num_received
        self.abort(f"gave no heartbeat for {self.heartbeat_timeout:g} s")

    def _end(self, error: ConnectionLostError) -> None:
        text = str(error)
        lost = error if text.startswith(self.name) else ConnectionLostError(f"{self.name}: {text}")
        self.closed.set_result(lost)
        for task in [*self._tasks, *self._handlers.values()]:
            task.cancel()
        for number in list(self._pending):
            answer = self._pop_pending(number)
            if answer is not None and not answer.done():
                answer.set_exception(lost)
                answer.exception()  # marks it as retrieved: a caller that has not sent its call yet gets it there


async def limit(work: Awaitable[T], seconds: float) -> T:
    """Await ``work`` and return its result; after ``seconds``, cancel it and raise a TimeoutError."""
    if sys.version_info >= (3, 11):
        async with asyncio.timeout(seconds):
            return await work
    try:
        return await asyncio.wait_for(work, seconds)
    except asyncio.TimeoutError:  # in Python 3.10 not the built-in TimeoutError
        raise TimeoutError from None


def _describe(number: int, error: Exception) -> list[object]:
    return [ERROR, number, type(error).__name__, str(error), traceback.format_exc()]


async def ignore_lost(work: Awaitable[None]) -> None:
    """Await ``work``; return even if its connection is lost meanwhile, which the peer's ``closed`` says anyway."""
    with contextlib.suppress(ConnectionLostError):
        await work
