"""One worker process of a pool: its start, the calls assigned to it, the monitoring of its progress, and its end."""

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlightning import intervals
from rlightning.processes.liveness import Deadline, Heartbeat, RestartPolicy
from rlightning.processes.managed_process import ManagedProcess
from rlightning.processes.process_table import find_process
from rlightning.rpc.client import ProcessStartError, connect_process, end_process
from rlightning.rpc.connection import ConnectionLostError, RPCError
from rlightning.rpc.peer import DeadlineExceededError, Method, Peer, RemoteError
from rlightning.rpc.progress import ProgressFile
from rlightning.rpc.run_key import environment_without_key
from rlightning.rpc.worker import STACK_SIGNAL
from rlightning.rpc.worker_limits import MB, WorkerLimits, WorkerOutput, find_excess

STACK_SECONDS = 10.0
"""Maximum seconds for a hanging process to write its stacks."""
EXCESS_STACK_SECONDS = 1.0
"""Maximum seconds for a process that exceeds a limit to write its stacks; its memory may still grow meanwhile."""
STACK_POLLS = 5
"""Number of polls with an unchanged size of the stacks after which they are complete."""
MAX_STACK_BYTES = 1 << 20


class WorkerLostError(RPCError):
    """A call killed its worker process or made it hang.

    Attributes:
        stacks: stacks of the process's threads, as faulthandler writes them; "" if unknown.
        caused_by_other: whether another call is known to be the cause.
    """

    def __init__(self, message: str, stacks: str = "", *, caused_by_other: bool = False) -> None:
        super().__init__(message)
        self.stacks, self.caused_by_other = stacks, caused_by_other


class WorkerHungError(WorkerLostError):
    """The call blocked its process for longer than the hang timeout."""


class WorkerExitError(WorkerLostError):
    """The call ended its process; the message says how, such as "exit code 3"."""


class Call:
    """A call, and the worker that runs it.

    Attributes:
        methods: methods that the worker may call.
        is_alone: whether the worker may run no other call at the same time.
    """

    def __init__(self, key: int, hang_timeout: float, methods: Mapping[str, Method]) -> None:
        self.key, self.hang_timeout, self.methods = key, hang_timeout, methods
        self.is_alone = False
        self.place: asyncio.Future[PooledWorker]
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


class WorkerEnd(NamedTuple):
    """How and why a worker ended.

    Attributes:
        causing_call: key of the call that was the cause; None if unknown.
        error: error of that call.
        calls: keys of all calls of the worker.
        may_repeat: whether the other calls may be repeated.
    """

    causing_call: int | None
    error: WorkerLostError
    calls: list[int]
    may_repeat: bool

    def error_of(self, key: int) -> WorkerLostError:
        """Return the error of call ``key`` of this worker, marked ``caused_by_other`` if another ended it."""
        caused_by_other = self.causing_call not in (None, key)
        return type(self.error)(str(self.error), self.error.stacks, caused_by_other=caused_by_other)


class PooledWorker:
    """One process of a pool.

    Args:
        command: command of the process, which creates a :class:`~rlightning.rpc.worker.Worker`.
        name: the worker's name in errors.
        limits: limits of the process.
        deaths: the pool's budget of restarts for which no call is the cause.
        may_repeat: whether calls may be repeated if the process ends because of another call.

    Attributes:
        peer: the connection to the process; None before it is ready.
        calls: the calls assigned to the worker, by key.
        abandoned: cancelled calls, one of which the process may still execute.
        ended: future, done when the process has ended.
    """

    def __init__(
        self, command: Sequence[str], *, name: str, limits: WorkerLimits, deaths: RestartPolicy, may_repeat: bool
    ) -> None:
        self._command, self._name, self._limits = command, name, limits
        self._deaths, self._may_repeat = deaths, may_repeat
        self.peer: Peer | None = None
        self.calls: dict[int, Call] = {}
        self.abandoned: dict[int, Call] = {}
        self.ended: asyncio.Future[WorkerEnd] = asyncio.get_running_loop().create_future()
        self._progress = ProgressFile.create()
        self._stacks = os.memfd_create("rlightning-stacks")
        self._process: ManagedProcess | None = None
        self._connected: Peer | None = None
        self._heartbeat = Heartbeat(intervals.WORKER_POLL_INTERVAL)
        self._has_news = asyncio.Event()
        self._is_hung = False
        self._output: WorkerOutput | None = None
        self._excess: str | None = None

    def has_capacity(self, call: Call, max_calls: int) -> bool:
        """Return whether the worker is ready and may run one more call; a call with ``is_alone`` runs with no other."""
        if self.peer is None or self.peer.closed.done() or self._is_hung or self._excess:
            return False
        if call.is_alone or any(other.is_alone for other in self.calls.values()):
            return not self.calls
        return len(self.calls) < max_calls

    def begin(self, call: Call) -> None:
        """Record a call that the pool has assigned to this worker; if the worker was idle, its monitoring resumes."""
        if not self.calls:
            self._heartbeat.beat()
            self._has_news.set()
        self.calls[call.key] = call

    async def start(self, setup: Sequence[object]) -> Peer:
        """Start the process; return its peer once the process has been set up.

        Raises:
            ProcessStartError: the process ended or timed out.
        """
        timeout, name = intervals.WORKER_START_TIMEOUT, self._name
        deadline = Deadline(timeout)
        fds, own = (self._progress.fd, self._stacks), environment_without_key()
        command = [*self._command, *map(str, fds)]
        if self._limits.max_output_mb is not None:
            self._output = WorkerOutput(self._limits.max_output_mb * MB)
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
                self._excess = find_excess(self._limits, self._process.pid, self._output)
            if self._excess:
                await self._write_stacks(peer, EXCESS_STACK_SECONDS)
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
                await self._write_stacks(peer, STACK_SECONDS)
                return

    async def finish(self, timeout: float) -> None:
        """Have the process cancel its calls and clean up, and wait for that at most ``timeout`` seconds."""
        if self.peer is not None:
            with contextlib.suppress(RPCError):
                await self.peer.call("finish", timeout=timeout)

    async def end(self) -> None:
        """End the process, and set the future ``ended`` to how it ended and, if known, to the call that caused it."""
        progress, how = self._progress.read(), ""
        if self._process is not None and self._connected is not None:
            how = await end_process(self._process, self._connected)
        how = self._excess or how
        stacks = self._read_stacks()
        self._progress.close()
        os.close(self._stacks)
        keys = list(self.calls)
        is_known = progress.is_executing or keys == [progress.call]
        causing_call = progress.call if is_known and progress.call in {*keys, *self.abandoned} else None
        error = WorkerHungError(f"{self._name} hung", stacks) if self._is_hung else WorkerExitError(how, stacks)
        is_explained = not keys or (causing_call is not None and self._may_repeat)
        self.ended.set_result(WorkerEnd(causing_call, error, keys, is_explained or self._deaths.take()))

    async def _write_stacks(self, peer: Peer, timeout: float) -> None:
        """Have the process write the stacks of its threads, and wait until it has, or has ended.

        A suspended process writes none. A stall of this process counts as almost no time.
        """
        assert self._process is not None
        found = find_process(self._process.pid)
        if found is not None and found.state in "TtZX":
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, STACK_SIGNAL)
        waiting, size, num_equal = Heartbeat(intervals.SHORT_POLL_INTERVAL), 0, 0
        while num_equal < STACK_POLLS and waiting.tick() < timeout:
            if peer.closed.done() or self._process.exit_code is not None:
                return
            await asyncio.sleep(intervals.SHORT_POLL_INTERVAL)
            size, before = os.fstat(self._stacks).st_size, size
            num_equal = num_equal + 1 if size and size == before else 0

    def _read_stacks(self) -> str:
        return os.pread(self._stacks, MAX_STACK_BYTES, 0).decode(errors="replace")
