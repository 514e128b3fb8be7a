"""The worker process of reward functions: sync ones run one by one, async ones concurrently on an event loop.

Light, as each worker starts with it: the standard library and msgpack only.
"""

import asyncio
import pickle
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

from rlightning.foreign_text import hide
from rlightning.rewards.calls import Function, Outcome, failure, run_call
from rlightning.rewards.event_loop import CallRunner
from rlightning.rewards.sources import ModuleSource, install
from rlightning.rpc.peer import Method
from rlightning.rpc.worker import Worker

ASYNC, SYNC = "async", "sync"
"""First argument of the process: what it runs."""


T = TypeVar("T")


class Setup(NamedTuple):
    """The message with which a worker process is started.

    Attributes:
        functions: pickled, each with its timeout in seconds; None where a function does not run in this process.
        modules: their sources.
        secrets: see :func:`~rlightning.foreign_text.hide`.
        search_path: ``sys.path``.
    """

    functions: list[tuple[bytes, float] | None]
    modules: dict[str, ModuleSource]
    secrets: dict[str, str]
    search_path: list[str]


class RewardWorker:
    """Runs the calls that this process receives.

    The event loop does not run while a sync function does: that may run one of its own.

    Args:
        kind: :data:`ASYNC` or :data:`SYNC`.
    """

    def __init__(self, kind: str) -> None:
        self._is_async = kind == ASYNC
        self._worker = Worker()
        self._loop = asyncio.new_event_loop()
        self._functions: list[Function | None] = []
        self._jobs: asyncio.Queue[tuple[Callable[[], Any], asyncio.Future[Any]]] = asyncio.Queue()

    def run(self) -> None:
        """Run calls until the pool ends this process."""
        if not self._is_async:
            one_by_one: dict[str, Method] = {"setup": self._set_up, "call": self._call_sync}
            self._loop.run_until_complete(self._worker.connect(one_by_one))
            while True:
                self._run_job()

        runner = CallRunner(self._loop, self._worker.progress.show)

        async def call(key: int, index: int, arguments: bytes) -> Outcome:
            return await runner.run(key, self._function(index), pickle.loads(arguments))

        methods: dict[str, Method] = {"setup": self._set_up, "call": call, "finish": runner.finish}
        parent = self._loop.run_until_complete(self._worker.connect(methods))
        self._run_job()  # the set-up
        self._loop.run_until_complete(parent.wait_closed())

    async def _set_up(self, pickled: bytes) -> None:
        await self._do(partial(self._load, pickled))

    async def _call_sync(self, key: int, index: int, arguments: bytes) -> Outcome:
        def job() -> Outcome:
            self._worker.progress.show(key, True)
            try:
                return run_call(self._function(index).function, pickle.loads(arguments))
            finally:
                self._worker.progress.show(0, False)

        return await self._do(job)

    async def _do(self, job: Callable[[], T]) -> T:
        done: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put_nowait((job, done))
        return await done

    def _run_job(self) -> None:
        """Run the next sync call, while the event loop stands still; its result is sent when the loop goes on."""
        job, done = self._loop.run_until_complete(self._jobs.get())
        if done.cancelled():
            return
        try:
            done.set_result(job())
        except Exception as error:
            done.set_exception(error)

    def _function(self, index: int) -> Function:
        function = self._functions[index]
        assert function is not None
        return function

    def _load(self, pickled: bytes) -> None:
        setup: Setup = pickle.loads(pickled)
        sys.path[:] = setup.search_path
        hide(setup.secrets)
        install(setup.modules)
        self._functions = [
            None if sent is None else Function(_import(sent[0]), self._is_async, sent[1]) for sent in setup.functions
        ]


def _import(pickled: bytes) -> Callable[..., Any] | Outcome:
    """Unpickle a function; if that fails, return the failed outcome that all its calls get."""
    try:
        function: Callable[..., Any] = pickle.loads(pickled)
        return function
    except BaseException as error:
        return failure(error)


def main() -> None:
    """Run calls until the pool ends this process."""
    RewardWorker(sys.argv[1]).run()
