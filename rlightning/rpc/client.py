"""Connects to a server or a child process, for callers in a thread without an event loop."""

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from rlightning import intervals
from rlightning.foreign_text import describe_error
from rlightning.processes.managed_process import ManagedProcess
from rlightning.rpc.authentication import authenticate_server, parse_url
from rlightning.rpc.connection import ConnectionLostError, RPCError
from rlightning.rpc.peer import DeadlineExceededError, Method, Peer, PeerSettings, limit

if TYPE_CHECKING:
    from typing import Unpack

T = TypeVar("T")
P = ParamSpec("P")

log = logging.getLogger(__name__)


class ProcessStartError(RPCError):
    """A child process ended or timed out before it was ready."""

    def __init__(self, message: str, log_tail: str) -> None:
        super().__init__(f"{message}\n{log_tail}".strip())


async def connect(
    url: str, key: bytes | None, methods: Mapping[str, Method], *, timeout: float, **settings: "Unpack[PeerSettings]"
) -> Peer:
    """Connect to a :class:`~rlightning.rpc.server.Server` and authenticate both sides.

    Args:
        url: ``tcp://host:port``.
        key: the run's key; None for a server without a key, of this user on this host.
        methods: methods that the server may call; see :class:`Peer`.
        timeout: maximum seconds until both sides are authenticated.
        settings: settings of :class:`Peer`.

    Raises:
        ValueError: ``url`` has another form.
        AuthenticationError: the keys differ; retrying does not help.
        BusyError: the server has its maximum number of clients.
        ConnectionLostError: there is no server, or it does not answer.
    """
    host, port = parse_url(url)
    try:
        end = await limit(_connect(host, port, key), timeout)
    except TimeoutError:
        raise ConnectionLostError(f"{url} did not answer for {timeout:g} s") from None
    except ConnectionLostError:
        raise
    except OSError as error:
        # asyncio's message has only the address; getaddrinfo's errors have no positive number.
        reason = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error)
        raise ConnectionLostError(f"{url} cannot be reached: {reason}") from error
    settings.setdefault("name", url)
    return await Peer.open(end, methods, **settings)


async def connect_process(process: ManagedProcess, methods: Mapping[str, Method], *, ready_timeout: float) -> Peer:
    """Connect to a child process, and wait until it reports that it is ready.

    Args:
        process: a started process, which is ended if it does not become ready.
        methods: methods that the process may call; see :class:`Peer`.
        ready_timeout: maximum seconds until the process calls ``notify("ready")``.

    Raises:
        ProcessStartError: the process ended or timed out; the message has the end of its log.
    """
    ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def set_ready() -> None:
        if not ready.done():
            ready.set_result(None)

    methods = {**methods, "ready": set_ready}
    peer = await Peer.open(process.connection, methods, name=process.name, heartbeat_timeout=float("inf"))
    try:
        await asyncio.wait([ready, peer.closed], timeout=ready_timeout, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            return peer
    except BaseException:
        await end_process(process, peer)
        raise
    is_late = not peer.closed.done()
    how = await end_process(process, peer)
    reason = f"was not ready after {ready_timeout:g} s" if is_late else f"ended before it was ready ({how})"
    raise ProcessStartError(f"{process.name} {reason}", process.log_tail())


async def end_process(process: ManagedProcess, peer: Peer) -> str:
    """End a child process with its process group, and close the connection to it.

    Args:
        process: the process to end. If it has closed its connection, it gets a short time to exit by itself.

    Returns:
        How the process ended, such as "exit code 3" or "SIGKILL".
    """
    if peer.closed.done():
        await _call_in_thread(process.wait, intervals.EXIT_STATUS_GRACE)
    await _call_in_thread(process.terminate)
    peer.abort("it was ended")
    return process.describe_end()


async def _call_in_thread(function: Callable[..., object], *arguments: object) -> None:
    """Call a function that blocks in another thread, or in this one if the interpreter shuts down."""
    try:
        call = asyncio.get_running_loop().run_in_executor(None, function, *arguments)
    except RuntimeError:  # no more threads are started
        function(*arguments)
    else:
        await call


async def _connect(host: str, port: int, key: bytes | None) -> socket.socket:
    loop = asyncio.get_running_loop()
    error: OSError = ConnectionLostError(f"{host} has no address")
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        end = socket.socket(family, kind, protocol)
        end.setblocking(False)
        try:
            await loop.sock_connect(end, address)
            await authenticate_server(end, key)
            return end
        except BaseException as problem:
            end.close()
            if not isinstance(problem, OSError) or isinstance(problem, ConnectionLostError):
                raise
            error = problem  # the next address may have a server
    raise error


class LoopThread:
    """An asyncio event loop in a daemon thread, for callers without a loop.

    A SystemExit or KeyboardInterrupt in a task does not end the loop. Work that is unfinished when the loop closes
    fails.

    Args:
        name: name of the thread.
        closes_at_exit: whether an ``atexit`` handler closes the loop; otherwise the caller has to call :meth:`close`.
    """

    def __init__(self, name: str, *, closes_at_exit: bool = True) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.SelectorEventLoop()  # the policy may belong to another library
        self._submitted: set[concurrent.futures.Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        if closes_at_exit:
            atexit.register(self.close)

    @property
    def ident(self) -> int:
        """The thread's identifier, as returned by :func:`threading.get_ident`."""
        return self._thread.ident or 0

    def run(self, work: Coroutine[object, object, T], timeout: float | None = None) -> T:
        """Run a coroutine on the loop and wait for it; return its result or raise its exception.

        Args:
            timeout: seconds after which the coroutine is cancelled; None for no limit.

        Raises:
            DeadlineExceededError: the timeout has passed.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("The event loop cannot wait for itself: await the coroutine.")
        future = self.submit(work)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:
            if future.done():  # the work's own error, or a result that came just then
                return future.result()
            raise DeadlineExceededError(f"it took more than {timeout:g} s") from None
        finally:
            future.cancel()  # in case an interruption, such as Ctrl-C, has ended this wait

    def call(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Call a function on the loop, and return its result.

        Raises:
            DeadlineExceededError: other code blocks the loop.
        """

        async def run() -> T:
            return function(*arguments, **named)

        try:
            return self.run(run(), timeout=intervals.LOOP_TIMEOUT)
        except DeadlineExceededError:
            raise DeadlineExceededError(
                f"the event loop '{self._thread.name}' did not respond for {intervals.LOOP_TIMEOUT:g} s: code that "
                "runs on it blocks. Environments that block belong into worker processes (WorkerEnvironment)"
            ) from None

    def submit(self, work: Coroutine[object, object, T]) -> "concurrent.futures.Future[T]":
        """Start a coroutine on the loop and return its future at once. Cancelling the future cancels the coroutine."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        self._submitted.add(future)
        future.add_done_callback(self._submitted.discard)
        return future

    def close(self) -> None:
        """Cancel the loop's tasks, let them clean up, and end the thread. May be called twice."""
        atexit.unregister(self.close)
        if self.loop.is_closed() or not self._thread.is_alive() or threading.current_thread() is self._thread:
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(2 * intervals.CANCEL_GRACE)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            while not self._run_until_stopped():
                pass
        finally:
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self.loop.run_until_complete(asyncio.wait(tasks, timeout=intervals.CANCEL_GRACE))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()
            for future in list(self._submitted):
                with contextlib.suppress(concurrent.futures.InvalidStateError):  # the future has just been cancelled
                    future.set_exception(RuntimeError(f"the event loop '{threading.current_thread().name}' has ended"))

    def _run_until_stopped(self) -> bool:
        """Run the loop; return False if a task's exception stopped it. The task's future also has the exception."""
        try:
            self.loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:  # signals come to the main thread, these from user code
            log.warning("A task of '%s' raised %s.", threading.current_thread().name, describe_error(error))
            return False
        return True


_background: list[LoopThread] = []
os.register_at_fork(after_in_child=_background.clear)
_background_lock = threading.Lock()


def background_loop() -> LoopThread:
    """Return this process's event loop for connections, which is started by the first call.

    User code, CUDA and torch.distributed never run on this loop; environments have their own loop.
    """
    with _background_lock:
        if not _background:
            _background.append(LoopThread("background-loop"))
        return _background[0]
