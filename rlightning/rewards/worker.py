"""The worker process of reward functions: sync functions run one by one, async ones concurrently on an event loop.

Imports only the standard library and msgpack, so that workers start quickly.
"""

import asyncio
import pickle
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

from rlightning.foreign_text import hide
from rlightning.rewards.calls import RewardCallable, RewardResult, failure, run_call
from rlightning.rewards.event_loop import CallRunner
from rlightning.rewards.sources import ModuleSource, install
from rlightning.rpc.peer import Method
from rlightning.rpc.worker import Worker

T = TypeVar("T")


class Setup(NamedTuple):
    """The first message to a worker process: its reward functions, pickled, and the sources of their modules.

    Attributes:
        is_async: whether the functions are async.
        functions: pickled functions, by their indices.
        modules: the kept sources of the functions' modules.
        secrets: texts that are masked in messages (:func:`~rlightning.foreign_text.hide`).
        search_path: ``sys.path``.
    """

    is_async: bool
    functions: dict[int, bytes]
    modules: dict[str, ModuleSource]
    secrets: dict[str, str]
    search_path: list[str]


class RewardWorker:
    """Runs reward functions in a child process of the trainer, which calls them by RPC.

    The event loop is stopped while a sync function runs, since the function may run an event loop itself.
    """

    def __init__(self) -> None:
        self._worker = Worker()
        self._loop = asyncio.new_event_loop()
        self._functions: dict[int, RewardCallable | RewardResult] = {}
        self._runner: CallRunner | None = None  # runs async functions
        self._jobs: asyncio.Queue[Callable[[], None]] = asyncio.Queue()

    def run(self) -> None:
        """Connect to the trainer's pool, and run the reward calls that it sends until it ends this process."""
        methods: dict[str, Method] = {"setup": self._set_up, "call": self._call, "finish": self._finish}
        parent = self._loop.run_until_complete(self._worker.connect(methods))
        self._run_job()  # the set-up
        while self._runner is None:
            self._run_job()
        self._loop.run_until_complete(parent.wait_closed())

    async def _set_up(self, pickled: bytes) -> None:
        await self._do(partial(self._load, pickled))

    async def _call(self, key: int, index: int, arguments: bytes, timeout: float) -> RewardResult:
        function = self._functions[index]
        if isinstance(function, RewardResult):
            return function
        if self._runner is not None:
            return await self._runner.run(key, function, pickle.loads(arguments), timeout)
        return await self._do(partial(self._call_sync, key, function, arguments))

    async def _finish(self) -> None:
        if self._runner is not None:
            await self._runner.finish()

    def _call_sync(self, key: int, function: RewardCallable, arguments: bytes) -> RewardResult:
        self._worker.progress.show(key, True)
        try:
            return run_call(function, pickle.loads(arguments))
        finally:
            self._worker.progress.show(0, False)

    async def _do(self, job: Callable[[], T]) -> T:
        """Run a job, during which the event loop is stopped; the result is sent once the loop continues."""
        done: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            if done.cancelled():
                return
            try:
                done.set_result(job())
            except Exception as error:
                done.set_exception(error)

        self._jobs.put_nowait(run)
        return await done

    def _run_job(self) -> None:
        self._loop.run_until_complete(self._jobs.get())()

    def _load(self, pickled: bytes) -> None:
        setup: Setup = pickle.loads(pickled)
        sys.path[:] = setup.search_path
        hide(setup.secrets)
        install(setup.modules)
        self._functions = {index: _import(function) for index, function in setup.functions.items()}
        if setup.is_async:
            self._runner = CallRunner(self._loop, self._worker.progress.show)


def _import(pickled: bytes) -> RewardCallable | RewardResult:
    """Unpickle a function; if that fails, return a failed result, which is then the result of all its calls."""
    try:
        function: RewardCallable = pickle.loads(pickled)
        return function
    except BaseException as error:
        return failure(error)


def main() -> None:
    """Run reward calls in this worker process until the trainer's pool ends it."""
    RewardWorker().run()
