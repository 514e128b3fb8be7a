"""Runs a user's object, whose sync methods run in a thread, since they may block."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextvars import copy_context
from functools import lru_cache, partial
from queue import SimpleQueue
from typing import Any, TypeVar

from rlightning import intervals
from rlightning.callables import is_coroutine_function
from rlightning.environments.environment import TrajectoryLostError
from rlightning.foreign_text import describe_error
from rlightning.python_values import JsonObject

log = logging.getLogger(__name__)

T = TypeVar("T")

SNAPSHOT_METHODS = ("snapshot", "restore")
"""Optional methods of an object: the first returns plain data, from which the second restores another object."""


async def await_user_code(work: Awaitable[T]) -> T:
    """Await user code; a SystemExit or KeyboardInterrupt, which would end the event loop, becomes a RuntimeError."""
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"the environment raised {describe_error(error)}") from error


class SerialThread:
    """A daemon thread that executes calls one after another; a hanging call does not keep the process alive."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, function: Callable[[], T]) -> T:
        """Call a function in the thread, and await its result. Cancelling the await does not stop the call."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        context = copy_context()

        def call() -> None:
            try:
                future.set_result(context.run(function))
            except (StopIteration, SystemExit, KeyboardInterrupt) as error:
                # A future cannot store the first; the others end event loops.
                future.set_exception(RuntimeError(f"the environment raised {describe_error(error)}"))
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(call)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="environment", daemon=True)
            self._thread.start()
        return await asyncio.shield(asyncio.wrap_future(future))

    def end(self) -> None:
        """End the thread after the calls that are already queued."""
        self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


@lru_cache
def _has_async_methods(kind: type) -> bool:
    """Return whether a class has public async methods; looked up once, as each trajectory constructs an object."""
    return any(not name.startswith("_") for name, _ in inspect.getmembers(kind, inspect.iscoroutinefunction))


class StepObject:
    """Calls the methods of a user's object, an environment or a tool, for one trajectory: async methods on the event
    loop, all others in one thread.

    ``made`` is the object; None until :meth:`make` has constructed it.
    """

    def __init__(self) -> None:
        self.made: Any = None
        self._thread = SerialThread()

    async def make(self, make: Callable[..., object], arguments: Mapping[str, object]) -> None:
        """Construct the user's object by calling ``make``, its class or a function, and store it in ``made``.

        This runs in the thread, or on the event loop if ``make`` or one of its methods is async, since it may then need
        the loop.
        """

        def make_here() -> None:
            self.made = make(**arguments)  # kept although the trajectory may have ended, so that it is closed

        kind = make if isinstance(make, type) else type(make)
        if inspect.iscoroutinefunction(make) or _has_async_methods(kind):
            await await_user_code(_call_here(make_here))
        else:
            await self._thread.run(make_here)
        if inspect.isawaitable(self.made):
            awaited, self.made = self.made, None
            self.made = await await_user_code(awaited)

    async def call(self, name: str, /, *arguments: object, **named: object) -> object:
        """Call the method ``name`` of the user's object, and return its result."""
        method = getattr(self.made, name)
        if inspect.iscoroutinefunction(method):
            return await await_user_code(method(*arguments, **named))
        returned = await self._thread.run(lambda: method(*arguments, **named))
        return await await_user_code(returned) if inspect.isawaitable(returned) else returned

    @property
    def has_snapshots(self) -> bool:
        """Whether the object has ``snapshot`` and ``restore``."""
        return all(callable(getattr(self.made, name, None)) for name in SNAPSHOT_METHODS)

    async def restore(self, state: object) -> None:
        """Call the object's ``restore`` with ``state``, which another object's ``snapshot`` returned; raises a
        TrajectoryLostError if that fails.
        """
        try:
            await self.call("restore", state)
        except Exception as error:
            raise TrajectoryLostError(
                f"{type(self.made).__name__}.restore() raised {describe_error(error)}", is_cause=False
            ) from error

    async def close(self) -> None:
        """Call the object's ``close``, if it exists, after any running call; errors are logged."""

        def close_here() -> object:
            return self.made.close() if callable(getattr(self.made, "close", None)) else None

        try:
            returned = await self._thread.run(close_here)
            if inspect.isawaitable(returned):
                await await_user_code(returned)
        except Exception as error:
            kind = type(self.made).__name__
            log.warning("%s could not be closed after a trajectory: %s", kind, describe_error(error), exc_info=True)
        finally:
            self._thread.end()


async def call_function(function: Callable[..., object], arguments: Mapping[str, object]) -> object:
    """Call a function and return its result; a function that is not async runs in a thread, since it may block."""
    thread, call = SerialThread(), partial(function, **arguments)
    try:
        returned = call() if is_coroutine_function(function) else await thread.run(call)
    finally:
        thread.end()
    return await await_user_code(returned) if inspect.isawaitable(returned) else returned


def read_state(state: object, *names: str) -> JsonObject:
    """Return a state from a checkpoint as a dictionary; raises a TrajectoryLostError unless its keys are ``names``."""
    if not isinstance(state, Mapping) or set(state) != set(names):
        raise TrajectoryLostError("its snapshot is another environment's", is_cause=False)
    return dict(state)


async def _call_here(function: Callable[[], T]) -> T:
    return function()


class Closing:
    """Closes the user's objects of ended trajectories, and limits the wait for each, since its ``close`` may hang."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self, *objects: StepObject) -> None:
        """Start to close the objects of a trajectory, and wait :data:`intervals.CANCEL_GRACE` seconds at most until
        they are closed.
        """
        tasks = [asyncio.ensure_future(one.close()) for one in objects]
        self._tasks.update(tasks)
        for task in tasks:
            task.add_done_callback(self._tasks.discard)
        if tasks:
            await asyncio.wait(tasks, timeout=intervals.CANCEL_GRACE)

    async def wait(self) -> None:
        """Wait for objects that are still closing, for :data:`intervals.CANCEL_GRACE` seconds at most."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=intervals.CANCEL_GRACE)
