"""Shared memory in which a worker process records which call it executes, and whether it makes progress.

The parent process can read it while a call holds the GIL, and after a call has ended the process.
"""

import asyncio
import os
import struct
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

CALL: ContextVar[int] = ContextVar("CALL", default=0)
"""The key of the call that a task belongs to, or 0; tasks that it creates inherit it."""

_FIELDS = struct.Struct("qqq")


class Progress(NamedTuple):
    """What a process has recorded last: the RPC call that it executed, and a counter of its steps.

    Attributes:
        num_steps: counter that grows while the process makes progress.
        call: key of the call whose step was executed last, or 0.
        is_executing: whether that step is still running.
    """

    num_steps: int = 0
    call: int = 0
    is_executing: bool = False


class ProgressFile:
    """Shared memory in which a process records its progress for its parent."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._num_steps = self._call = 0

    @classmethod
    def create(cls) -> "ProgressFile":
        """Return a ProgressFile of new shared memory, whose descriptor ``fd`` a child process can inherit."""
        fd = os.memfd_create("rlightning-progress")
        os.pwrite(fd, _FIELDS.pack(0, 0, 0), 0)
        return cls(fd)

    def show(self, call: int, is_executing: bool) -> None:
        """Record that a step of an RPC call begins (``is_executing``) or has ended; ``call=0`` is the last call."""
        self._num_steps += 1
        self._call = call or self._call
        os.pwrite(self.fd, _FIELDS.pack(self._num_steps, self._call, is_executing), 0)

    def read(self) -> Progress:
        """Return the progress that was recorded last."""
        num_steps, call, is_executing = _FIELDS.unpack(os.pread(self.fd, _FIELDS.size, 0))
        return Progress(num_steps, call, bool(is_executing))

    def close(self) -> None:
        """Close this process's descriptor of the shared memory."""
        os.close(self.fd)


def track_tasks(loop: asyncio.AbstractEventLoop, show: Callable[[int, bool], None]) -> None:
    """Have an event loop call ``show`` before and after each step of a task that an RPC call creates from now on.

    ``show(key, True)`` is called before each step of a task, with the key of its call (:data:`CALL`), and
    ``show(0, False)`` after it.
    """

    def make_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> "asyncio.Task[Any]":
        call = CALL.get()
        return asyncio.Task(_Steps(work, call, show) if call else work, loop=loop, **options)

    loop.set_task_factory(make_task)


def call_tasks(loop: asyncio.AbstractEventLoop) -> "set[asyncio.Task[object]]":
    """Return the loop's unfinished tasks that belong to RPC calls, also those that such tasks have created."""
    return {task for task in asyncio.all_tasks(loop) if isinstance(task.get_coro(), _Steps)}


class _Steps(Coroutine[Any, Any, Any]):
    """A coroutine wrapper that records, during each step, which call the task belongs to."""

    def __init__(self, work: Coroutine[object, object, object], call: int, show: Callable[[int, bool], None]) -> None:
        self._work, self._call, self._show = work, call, show

    def send(self, value: object) -> object:
        return self._run_step(self._work.send, value)

    def throw(self, *error: object) -> object:
        return self._run_step(self._work.throw, *error)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[object, None, object]:
        return self._work.__await__()

    def __getattr__(self, name: str) -> object:
        """Return an attribute of the wrapped coroutine, such as ``cr_frame``."""
        return getattr(self._work, name)

    def _run_step(self, step: Callable[..., T], *arguments: object) -> T:
        self._show(self._call, True)
        try:
            return step(*arguments)
        finally:
            self._show(0, False)
