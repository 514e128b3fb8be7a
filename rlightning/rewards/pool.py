"""Runs calls of reward functions in worker processes; functions that cannot be pickled run in this process."""

import asyncio
import pickle
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from rlightning import intervals
from rlightning.errors import RewardError
from rlightning.foreign_text import cut, hidden
from rlightning.processes.managed_process import python_command
from rlightning.rewards.calls import RewardResult
from rlightning.rewards.config import BoundReward
from rlightning.rewards.event_loop import MAX_CONCURRENT, free_thread, wait_cancelled
from rlightning.rewards.sources import KeptSources, install
from rlightning.rewards.worker import Setup
from rlightning.rpc import ProcessStartError, background_loop
from rlightning.rpc.worker_pool import WorkerExitError, WorkerHungError, WorkerPool

MAX_QUEUED = 3
"""Maximum number of queued calls of a worker for sync functions, in addition to the running one."""
CALLERS = (" in run_call", " in await_result", " in _run_step")
"""Line endings of the stack frames of this package, outside of which the reward function's frames are."""


class RewardPool:
    """Runs reward calls in the background, each with the timeout of its function.

    Sync functions run in several processes, each with one call at a time. Async functions run in another process, up to
    64 concurrent calls on its event loop, so that they share their module's state, such as an HTTP client.

    Args:
        num_workers: number of processes for sync functions, and maximum number of threads of this process.
        num_loops: number of processes for async functions.
    """

    def __init__(
        self,
        functions: Sequence[BoundReward],
        sources: KeptSources,
        num_workers: int,
        *,
        num_loops: int = 1,
    ) -> None:
        self._functions = functions
        self._workers = {
            is_async: WorkerPool(
                python_command("rlightning.rewards.worker"),
                name="A reward worker",
                num_workers=num_loops if is_async else num_workers,
                max_calls=MAX_CONCURRENT if is_async else 1,
                max_queued=0 if is_async else MAX_QUEUED,
                setup=[self._make_setup(is_async, sources)],
                finish_timeout=3 * intervals.CANCEL_GRACE if is_async else 0.0,
            )
            for is_async in (False, True)
        }
        self._places = {True: asyncio.Semaphore(MAX_CONCURRENT * num_loops), False: asyncio.Semaphore(num_workers)}
        self._finder = None if all(f.pickled for f in functions) else install(sources.modules)
        self._calls: set[asyncio.Task[RewardResult]] = set()

    def submit(self, index: int, arguments: dict[str, object]) -> "Future[RewardResult]":
        """Start a call and return its future at once. Cancelling the future cancels the call.

        Returns:
            The future result; it raises a RewardError if no worker can start.
        """
        is_local = self._functions[index].pickled is None
        return background_loop().submit(self._call(index, arguments if is_local else pickle.dumps(arguments)))

    def close(self) -> None:
        """Cancel all calls, let them clean up, and end the processes; later calls start new ones."""
        background_loop().run(self._close())
        if self._finder is not None:
            self._finder.remove()
            self._finder = None

    async def _close(self) -> None:
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.gather(wait_cancelled(), *(workers.close() for workers in self._workers.values()))

    async def _call(self, index: int, arguments: dict[str, object] | bytes) -> RewardResult:
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            if isinstance(arguments, bytes):
                return await self._call_worker(index, arguments)
            return await self._call_thread(self._functions[index], arguments)
        finally:
            self._calls.discard(task)

    async def _call_worker(self, index: int, arguments: bytes) -> RewardResult:
        function = self._functions[index]
        workers = self._workers[function.is_async]
        try:
            return RewardResult(*await workers.call(index, arguments, function.timeout, hang_timeout=function.timeout))
        except WorkerHungError as error:
            did = "async reward function blocked its event loop for" if function.is_async else "reward function took"
            rule = f"TimeoutError: the {did} more than its timeout={function.timeout:g} s"
            return RewardResult.failed(f"{stack_in(error.stacks)}{rule}")
        except WorkerExitError as error:
            rule = f"ProcessDied: the reward function ended its process ({error})"
            return RewardResult.failed(f"{stack_in(error.stacks)}{rule}")
        except ProcessStartError as error:
            line, _, log = str(error).partition("\n")
            raise RewardError(f"{line}, while it imported the reward functions. {cut(log)}".rstrip()) from error

    async def _call_thread(self, function: BoundReward, arguments: Mapping[str, object]) -> RewardResult:
        """Run a call in this process: an async function on a thread's event loop, a sync function in its own thread."""
        async with self._places[function.is_async]:
            outcome = None
            while outcome is None:
                outcome = await free_thread().execute(function.function, arguments, function.timeout)
            return outcome

    def _make_setup(self, is_async: bool, sources: KeptSources) -> bytes:
        chosen = {i: f.pickled for i, f in enumerate(self._functions) if f.pickled and f.is_async == is_async}
        return pickle.dumps(Setup(is_async, chosen, sources.modules, hidden(), sys.path))


def stack_in(log: str) -> str:
    """Return the reward function's frames, innermost first, from faulthandler's dump of all threads."""
    for section in re.split(r"\n(?=Current thread|Thread )", log):
        frames = [line for line in section.splitlines() if line.startswith("  File ")]
        ours = next((i for i, line in enumerate(frames) if line.endswith(CALLERS)), None)
        if ours:
            return "Stack (most recent call first):\n" + "\n".join(frames[:ours]) + "\n"
    return ""
