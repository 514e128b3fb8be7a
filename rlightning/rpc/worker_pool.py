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
import itertools
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlightning.foreign_text import cut_line
from rlightning.processes.liveness import RestartPolicy
from rlightning.rpc.client import ProcessStartError
from rlightning.rpc.connection import ConnectionLostError
from rlightning.rpc.peer import Method
from rlightning.rpc.pooled_worker import Call, PooledWorker, WorkerExitError, WorkerHungError, WorkerLostError
from rlightning.rpc.worker_limits import UNLIMITED, WorkerLimits

__all__ = ["WorkerExitError", "WorkerHungError", "WorkerLostError", "WorkerPool"]

log = logging.getLogger(__name__)

MAX_UNEXPLAINED_DEATHS = 20
"""Maximum number of workers in a row that ended without a call as the cause, and without a successful call between."""


class WorkerPool:
    """Runs calls in child processes, which start with the first calls. All methods must be called on one event loop.

    Args:
        command: command of a worker process, which creates a :class:`~rlightning.rpc.worker.Worker`.
        name: name of a worker, for errors.
        num_workers: maximum number of processes.
        max_calls: maximum number of concurrent calls of a process.
        max_queued: number of additional calls that are sent to a process in advance.
        setup: arguments of the worker's ``setup``, which is called first.
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
        finish_timeout: float = 0.0,
        may_repeat: bool = True,
        limits: WorkerLimits = UNLIMITED,
    ) -> None:
        self.command, self.name, self.setup, self.may_repeat, self.limits = command, name, setup, may_repeat, limits
        self.num_workers, self.max_calls, self.max_queued = num_workers, max_calls, max_queued
        self.finish_timeout = finish_timeout
        self._workers: list[PooledWorker] = []
        self._lives: set[asyncio.Task[None]] = set()
        self._waiting: deque[Call] = deque()
        self._keys = itertools.count(1)
        self._num_closed, self._has_started = 0, False
        self.deaths = RestartPolicy(MAX_UNEXPLAINED_DEATHS)

    async def check(self) -> None:
        """Start all worker processes now instead of at the first calls, and return when one is ready.

        Raises:
            ProcessStartError: no worker started.
        """
        call = Call(next(self._keys), float("inf"), {})
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
        call, num_closed = Call(next(self._keys), hang_timeout, methods or {}), self._num_closed
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
                if end.causing_call == call.key or not (end.may_repeat and self.may_repeat):
                    raise end.error_of(call.key) from None
                call.is_alone = end.causing_call is None and len(end.calls) > 1
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

    async def _get_place(self, call: Call) -> PooledWorker:
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
            worker = PooledWorker(
                self.command, name=self.name, limits=self.limits, deaths=self.deaths, may_repeat=self.may_repeat
            )
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

    async def _live(self, worker: PooledWorker) -> None:
        """Start a worker, monitor it, and end it."""
        try:
            peer = await worker.start(self.setup)
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
