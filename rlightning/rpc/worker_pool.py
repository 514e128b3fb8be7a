"""A pool of worker processes that are restarted: a call that hangs or kills its process is the only one that fails.

::

    WorkerPool.call ---> waiting ---> worker: a process with up to ``max_calls`` calls ---> result
                            ^                 | hangs or dies: it is ended
                            |                 v
                            +--- others ------+---> WorkerHungError or WorkerExitError of the call that it executed

The process has recorded which call it executed (:mod:`rlightning.rpc.progress`). If the cause is unknown, as with a
thread, each call of the process is repeated alone, and the one that fails again is the cause. If calls may not be
repeated, all calls of the process fail. A call may provide methods, which the worker calls on the same connection.
"""

import asyncio
import contextlib
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rlightning import intervals
from rlightning.foreign_text import cut_line
from rlightning.processes.liveness import Deadline, Heartbeat, RestartPolicy
from rlightning.processes.managed_process import ManagedProcess
from rlightning.rpc.client import ProcessStartError, connect_process, end_process
from rlightning.rpc.connection import ConnectionLostError, RPCError
from rlightning.rpc.peer import DeadlineExceededError, Method, Peer, RemoteError
from rlightning.rpc.progress import ProgressFile
from rlightning.rpc.run_key import environment_without_key
from rlightning.rpc.worker import STACK_SIGNAL
from rlightning.rpc.worker_limits import MB, UNLIMITED, WorkerLimits, WorkerOutput, find_excess

log = logging.getLogger(__name__)

STACK_SECONDS = 1.0
"""Maximum seconds for a hanging process to write its stacks; a suspended process writes none."""
MAX_STACK_BYTES = 1 << 20
MAX_UNEXPLAINED_DEATHS = 20
"""Maximum number of workers in a row that ended without a call as the cause, and without a successful call between."""


class WorkerLostError(RPCError):
    """A call killed its worker process or made it hang.

    Attributes:
        stacks: stacks of the process's threads, as faulthandler writes them; "" if unknown.
        is_bystander: whether another call is known to be the cause.
    """

    def __init__(self, message: str, stacks: str = "", *, is_bystander: bool = False) -> None:
        super().__init__(message)
        self.stacks, self.is_bystander = stacks, is_bystander


class WorkerHungError(WorkerLostError):
    """The call blocked its process for longer than the hang timeout."""


class WorkerExitError(WorkerLostError):
    """The call ended its process; the message says how, such as "exit code 3"."""


class WorkerPool:
    """Runs calls in child processes, which start with the first calls. All methods must be called on one event loop.

    Args:
        command: command of a worker process, which creates a :class:`~rlightning.rpc.worker.Worker`.
        name: name of a worker, for errors.
        num_workers: maximum number of processes.
        max_calls: maximum number of concurrent calls of a process.
        max_queued: number of additional calls that are sent to a process in advance.
        setup: arguments of the worker's ``setup``, which is called first.
        start_timeout: maximum seconds until ``setup`` has returned.
        finish_timeout: maximum seconds of the worker's ``finish`` when the pool closes; 0 to skip ``finish``.
        may_repeat: whether a call is repeated if its worker ended for a reason other than this call.
        limits: limits of a worker, which is killed if it exceeds one; its calls then fail.

    Attributes:
        deaths: the budget of restarts for which no call is the cause, or of all restarts if calls are not repeated.
            After the first worker has started, workers that fail to start count too.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        num_workers: int,
        max_calls: int,
        max_queued: int = 0,
        setup: Sequence[Any] = (),
        start_timeout: float = 300.0,
        finish_timeout: float = 0.0,
        may_repeat: bool = True,
        limits: WorkerLimits = UNLIMITED,
    ) -> None:
        self.command, self.name, self.setup, self.may_repeat, self.limits = command, name, setup, may_repeat, limits
        self.num_workers, self.max_calls, self.max_queued = num_workers, max_calls, max_queued
        self.start_timeout, self.finish_timeout = start_timeout, finish_timeout
        self._workers: list[_Worker] = []
        self._lives: set[asyncio.Task[None]] = set()
        self._waiting: deque[_Call] = deque()
        self._keys = itertools.count(1)
        self._num_closed, self._has_started = 0, False
        self.deaths = RestartPolicy(MAX_UNEXPLAINED_DEATHS)

    async def check(self) -> None:
        """Start all worker processes now instead of at the first calls, and return when one is ready.

        Raises:
            ProcessStartError: no worker started.
        """
        call = _Call(next(self._keys), float("inf"), {})
        self._start_workers(self.num_workers)
        worker = await self._get_place(call)
        del worker.calls[call.key]
        self._dispatch()

    async def call(
        self,
        *arguments: object,
        hang_timeout: float,
        methods: Mapping[str, Method] | None = None,
        on_start: Callable[[], None] = lambda: None,
    ) -> Any:
        """Run a call in a worker, and return its result. If the worker ends, and not because of this call, repeat it.

        Args:
            arguments: plain data, for the worker's ``call``.
            hang_timeout: maximum seconds for which the call may block its process.
            methods: methods that the worker may call until this call ends, by ``request`` with the call's key and a
                name.
            on_start: called when a worker takes the call.

        Raises:
            WorkerLostError: the call hung, or ended its process.
            RemoteError: the worker's ``call`` raised an exception.
            ProcessStartError: a worker did not start.
            ConnectionLostError: the pool was closed.
        """
        call, num_closed = _Call(next(self._keys), hang_timeout, methods or {}), self._num_closed
        while True:
            worker = await self._get_place(call)
            assert worker.peer is not None
            on_start()
            try:
                result = await worker.peer.call("call", call.key, *arguments)
            except asyncio.CancelledError:
                worker.abandoned[call.key] = call
                raise
            except ConnectionLostError:
                end = await asyncio.shield(worker.ended)
                if self._num_closed > num_closed:
                    raise ConnectionLostError("the pool was closed") from None
                if end.culprit == call.key or not (end.may_repeat and self.may_repeat):
                    raise end.error_of(call.key) from None
                call.is_alone = end.culprit is None and len(end.calls) > 1
            else:
                self.deaths.reset()
                return result
            finally:
                worker.calls.pop(call.key, None)
                call.cancel_requests()
                self._dispatch()

    async def close(self) -> None:
        """End all processes; pending calls fail with a ConnectionLostError. Later calls start new processes."""
        self._num_closed += 1
        finishing = [worker.finish(self.finish_timeout) for worker in self._workers if self.finish_timeout]
        await asyncio.gather(*finishing)
        self._fail_waiting(ConnectionLostError("the pool was closed"))  # otherwise waiting calls would start workers
        lives = list(self._lives)
        for life in lives:
            life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)

    async def _get_place(self, call: "_Call") -> "_Worker":
        """Wait for a worker that can take the call, and return the worker with the call added to its ``calls``."""
        call.place = asyncio.get_running_loop().create_future()
        (self._waiting.appendleft if call.is_alone else self._waiting.append)(call)
        self._start_workers(self._num_calls)
        self._dispatch()
        try:
            return await call.place
        except asyncio.CancelledError:
            if call in self._waiting:
                self._waiting.remove(call)
            elif call.place.done() and not call.place.cancelled() and call.place.exception() is None:
                call.place.result().calls.pop(call.key, None)
                self._dispatch()
            raise

    def _dispatch(self) -> None:
        """Assign waiting calls to workers in order, and start workers for the remaining ones."""
        while self._waiting:
            call = self._waiting[0]
            if call.place.done():  # the call was cancelled
                self._waiting.popleft()
                continue
            limit = self.max_calls + min(self.max_queued, len(self._waiting) // (2 * self.num_workers))
            if self._num_starting:  # leave a share of the calls to the workers that are starting
                limit = min(limit, -(-self._num_calls // self.num_workers))
            free = [worker for worker in self._workers if worker.has_capacity(call, limit)]
            if not free:
                break
            self._waiting.popleft()
            worker = min(free, key=lambda worker: len(worker.calls))
            worker.begin(call)
            call.place.set_result(worker)
        self._start_workers(len(self._workers) - self._num_starting + len(self._waiting))

    def _start_workers(self, num_wanted: int) -> None:
        """Start workers until ``num_wanted``, or the maximum number, are running."""
        while len(self._workers) < min(num_wanted, self.num_workers):
            worker = _Worker(self)
            self._workers.append(worker)
            life = asyncio.ensure_future(self._live(worker))
            self._lives.add(life)
            life.add_done_callback(self._lives.discard)

    @property
    def _num_calls(self) -> int:
        return len(self._waiting) + sum(len(worker.calls) for worker in self._workers)

    @property
    def _num_starting(self) -> int:
        return sum(worker.peer is None for worker in self._workers)

    def _fail_waiting(self, error: Exception) -> None:
        waiting, self._waiting = list(self._waiting), deque()
        for call in waiting:
            if not call.place.done():
                call.place.set_exception(error)

    async def _live(self, worker: "_Worker") -> None:
        """Start a worker, monitor it, and end it."""
        try:
            peer = await worker.start(self.setup, self.start_timeout)
            self._has_started = True
            self._dispatch()
            await worker.watch(peer)
        except (ProcessStartError, OSError) as error:
            if self._has_started and self.deaths.take():  # other workers, or the next one, take the calls
                log.warning("%s did not start, as others have: %s", self.name, cut_line(str(error)))
            else:
                self._fail_waiting(error)
        finally:
            self._workers.remove(worker)
            await asyncio.shield(worker.end())
            self._dispatch()


class _Call:
    """A call, and the worker that runs it.

    Attributes:
        methods: methods that the worker may call.
        is_alone: whether the worker may run no other call at the same time.
    """

    def __init__(self, key: int, hang_timeout: float, methods: Mapping[str, Method]) -> None:
        self.key, self.hang_timeout, self.methods = key, hang_timeout, methods
        self.is_alone = False
        self.place: asyncio.Future[_Worker]
        self._requests: set[asyncio.Task[Any]] = set()

    async def serve(self, method: str, *arguments: object) -> object:
        """Run the one of this call's ``methods`` that the worker has requested by RPC, and return its result."""
        request = asyncio.ensure_future(self.methods[method](*arguments))
        self._requests.add(request)
        request.add_done_callback(self._requests.discard)
        try:
            return await asyncio.shield(request)
        except asyncio.CancelledError:
            if not request.cancelling():
                request.cancel()
            raise

    def cancel_requests(self) -> None:
        """Cancel the requests that the worker made to this process during a call that has ended."""
        for request in self._requests:
            if not request.cancelling():  # else it is cleaning up, which a second cancellation would end
                request.cancel()


class _End(NamedTuple):
    """How and why a worker ended.

    Attributes:
        culprit: key of the call that was the cause; None if unknown.
        error: error of that call.
        calls: keys of all calls of the worker.
        may_repeat: whether the other calls may be repeated.
    """

    culprit: int | None
    error: WorkerLostError
    calls: list[int]
    may_repeat: bool

    def error_of(self, key: int) -> WorkerLostError:
        """Return the error of call ``key`` of this worker, marked ``is_bystander`` if another call ended the worker."""
        is_bystander = self.culprit not in (None, key)
        return type(self.error)(str(self.error), self.error.stacks, is_bystander=is_bystander)


class _Worker:
    """One process of the pool.

    Attributes:
        peer: the connection to the process; None before it is ready.
        abandoned: cancelled calls, one of which the process may still execute.
        ended: future, done when the process has ended.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.peer: Peer | None = None
        self.calls: dict[int, _Call] = {}
        self.abandoned: dict[int, _Call] = {}
        self.ended: asyncio.Future[_End] = asyncio.get_running_loop().create_future()
        self._progress = ProgressFile.create()
        self._stacks = os.memfd_create("rlightning-stacks")
        self._process: ManagedProcess | None = None
        self._connected: Peer | None = None
        self._heartbeat = Heartbeat(intervals.WORKER_POLL_INTERVAL)
        self._has_news = asyncio.Event()
        self._is_hung = False
        self._output: WorkerOutput | None = None
        self._excess: str | None = None

    def has_capacity(self, call: _Call, max_calls: int) -> bool:
        """Return whether the worker is ready and may run one more call; a call with ``is_alone`` runs with no other."""
        if self.peer is None or self.peer.closed.done() or self._is_hung or self._excess:
            return False
        if call.is_alone or any(other.is_alone for other in self.calls.values()):
            return not self.calls
        return len(self.calls) < max_calls

    def begin(self, call: _Call) -> None:
        """Record a call that the pool has assigned to this worker; if the worker was idle, its monitoring resumes."""
        if not self.calls:
            self._heartbeat.beat()
            self._has_news.set()
        self.calls[call.key] = call

    async def start(self, setup: Sequence[object], timeout: float) -> Peer:
        """Start the process; return its peer once the process has been set up.

        Raises:
            ProcessStartError: the process ended or timed out.
        """
        deadline, name = Deadline(timeout), self.pool.name
        fds, own = (self._progress.fd, self._stacks), environment_without_key()
        command = [*self.pool.command, *map(str, fds)]
        if self.pool.limits.max_output_mb is not None:
            self._output = WorkerOutput(self.pool.limits.max_output_mb * MB)
        try:
            output = None if self._output is None else self._output.fd
            self._process = process = ManagedProcess(command, name=name, pass_fds=fds, output=output, environment=own)
        finally:
            if self._output is not None:
                self._output.close_fd()
        self._connected = await connect_process(process, {"request": self._serve}, ready_timeout=timeout)
        try:
            await self._connected.call("setup", *setup, timeout=deadline.remaining)
        except ConnectionLostError:
            how = await end_process(process, self._connected)
            raise ProcessStartError(f"{name} ended before it was ready ({how})", self._read_stacks()) from None
        except DeadlineExceededError:
            raise ProcessStartError(f"{name} was not ready after {timeout:g} s", self._read_stacks()) from None
        except RemoteError as error:
            raise ProcessStartError(f"{name} could not be set up: {error}", error.traceback) from error
        self.peer = self._connected
        return self.peer

    async def _serve(self, key: int, method: str, *arguments: object) -> object:
        """Run the method that the worker requests for one of its calls."""
        if key not in self.calls:
            raise LookupError("the call has ended")
        return await self.calls[key].serve(method, *arguments)

    async def watch(self, peer: Peer) -> None:
        """Wait until the process has ended, hangs, or exceeds a limit."""
        peer.closed.add_done_callback(lambda _: self._has_news.set())
        num_steps = -1
        while not peer.closed.done():
            if not self.calls and not self.abandoned:
                self._has_news.clear()
                await self._has_news.wait()
                continue
            await asyncio.wait([peer.closed], timeout=self._heartbeat.interval)
            if self._process is not None and self._process.exit_code is not None:
                return  # a process that it has forked may hold the connection open
            if self._process is not None:
                self._excess = find_excess(self.pool.limits, self._process.pid, self._output)
            if self._excess:
                await self._write_stacks()
                return
            silent_seconds = self._heartbeat.tick()
            progress = self._progress.read()
            if progress.num_steps != num_steps:
                num_steps = progress.num_steps
                self._heartbeat.beat()
            self.abandoned = {key: call for key, call in self.abandoned.items() if progress[1:] == (key, True)}
            at_work = {**self.calls, **self.abandoned}
            if progress.is_executing and progress.call in at_work:
                at_work = {progress.call: at_work[progress.call]}
            timeout = max((call.hang_timeout for call in at_work.values()), default=silent_seconds)
            if silent_seconds > timeout + intervals.REWARD_BLOCKED_GRACE:
                self._is_hung = True
                await self._write_stacks()
                return

    async def finish(self, timeout: float) -> None:
        """Have the process cancel its calls and clean up, and wait for that at most ``timeout`` seconds."""
        if self.peer is not None:
            with contextlib.suppress(RPCError):
                await self.peer.call("finish", timeout=timeout)

    async def end(self) -> None:
        """End the process, and report by the future ``ended`` how it ended and, if known, which call was the cause."""
        progress, how = self._progress.read(), ""
        if self._process is not None and self._connected is not None:
            how = await end_process(self._process, self._connected)
        how = self._excess or how
        stacks = self._read_stacks()
        self._progress.close()
        os.close(self._stacks)
        keys = list(self.calls)
        is_known = progress.is_executing or keys == [progress.call]
        culprit = progress.call if is_known and progress.call in {*keys, *self.abandoned} else None
        error = WorkerHungError(f"{self.pool.name} hung", stacks) if self._is_hung else WorkerExitError(how, stacks)
        is_explained = not keys or (culprit is not None and self.pool.may_repeat)
        self.ended.set_result(_End(culprit, error, keys, is_explained or self.pool.deaths.take()))

    async def _write_stacks(self) -> None:
        """Have the process write the stacks of its threads to its output."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, STACK_SIGNAL)
        deadline = Deadline(STACK_SECONDS)
        while not deadline.is_over and not os.fstat(self._stacks).st_size:
            await asyncio.sleep(intervals.SHORT_POLL_INTERVAL)

    def _read_stacks(self) -> str:
        return os.pread(self._stacks, MAX_STACK_BYTES, 0).decode(errors="replace")
