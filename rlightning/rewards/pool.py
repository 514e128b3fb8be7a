"""Runs calls of reward functions in worker processes; functions that cannot be pickled run in this process."""

import asyncio
import pickle
import re
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from rlightning import intervals
from rlightning.errors import RewardError
from rlightning.foreign_text import cut, hidden
from rlightning.processes.managed_process import python_command
from rlightning.rewards.calls import Function, Outcome
from rlightning.rewards.config import BoundReward
from rlightning.rewards.event_loop import MAX_CONCURRENT, LocalPool
from rlightning.rewards.sources import KeptSources, install
from rlightning.rewards.worker import ASYNC, SYNC, Setup
from rlightning.rpc import ProcessStartError, background_loop
from rlightning.rpc.worker_pool import WorkerDiedError, WorkerHungError, WorkerPool

START_TIMEOUT = 300.0
"""Seconds in which a worker must have imported the functions' modules."""
MAX_QUEUED = 3
"""Calls that a worker of sync functions has besides the one that it runs."""
CALLERS = (" in run_call", " in await_result", " in _run_step")
"""Ends of the lines of a stack at which our own frames begin."""


class RewardPool:
    """Runs reward calls in the background, each with the timeout of its function.

    Sync functions run in several processes, one call at a time. Async functions run in one, up to 64 calls at once, on
    one event loop: what a function's module keeps between calls, such as an HTTP client, serves them all.

    Args:
        num_workers: processes of sync functions, and threads of this process, at once.
    """

    def __init__(self, functions: Sequence[BoundReward], sources: KeptSources, num_workers: int) -> None:
        self._functions = functions
        self._workers = {
            is_async: WorkerPool(
                python_command("rlightning.rewards.worker", ASYNC if is_async else SYNC),
                name="A reward worker",
                num_workers=1 if is_async else num_workers,
                max_calls=MAX_CONCURRENT if is_async else 1,
                max_queued=0 if is_async else MAX_QUEUED,
                setup=[self._make_setup(is_async, sources)],
                start_timeout=START_TIMEOUT,
                finish_timeout=3 * intervals.CANCEL_GRACE if is_async else 0.0,
            )
            for is_async in (False, True)
        }
        self._local = LocalPool(num_workers)
        self._finder = None if all(f.pickled for f in functions) else install(sources.modules)
        self._running: set[Future[Outcome]] = set()

    def submit(self, index: int, arguments: dict[str, Any]) -> "Future[Outcome]":
        """Start a call and return its future at once. Cancelling the future cancels the call.

        Returns:
            What comes of the call; a RewardError if no worker can start.
        """
        function = self._functions[index]
        if function.pickled is None:
            return self._local.submit(Function(function.function, function.is_async, function.timeout), arguments)
        outcome = background_loop().submit(self._call(index, pickle.dumps(arguments)))
        self._running.add(outcome)
        outcome.add_done_callback(self._running.discard)
        return outcome

    def close(self) -> None:
        """Cancel all calls, let them clean up, and end the processes; a later call starts new ones."""
        for outcome in list(self._running):
            outcome.cancel()
        background_loop().run(self._close_workers())
        self._local.close()
        if self._finder is not None:
            self._finder.remove()
            self._finder = None

    async def _close_workers(self) -> None:
        await asyncio.gather(*(workers.close() for workers in self._workers.values()))

    async def _call(self, index: int, arguments: bytes) -> Outcome:
        function = self._functions[index]
        workers = self._workers[function.is_async]
        try:
            return Outcome(*await workers.call(index, arguments, hang_timeout=function.timeout))
        except WorkerHungError as error:
            did = "async reward function blocked its event loop for" if function.is_async else "reward function took"
            rule = f"TimeoutError: the {did} more than its timeout={function.timeout:g} s"
            return Outcome.failed(f"{stack_in(error.stacks)}{rule}")
        except WorkerDiedError as error:
            rule = f"ProcessDied: the reward function ended its process ({error})"
            return Outcome.failed(f"{stack_in(error.stacks)}{rule}")
        except ProcessStartError as error:
            line, _, log = str(error).partition("\n")
            raise RewardError(f"{line}, while it imported the reward functions. {cut(log)}".rstrip()) from error

    def _make_setup(self, is_async: bool, sources: KeptSources) -> bytes:
        functions = [
            (f.pickled, f.timeout) if f.pickled is not None and f.is_async == is_async else None
            for f in self._functions
        ]
        return pickle.dumps(Setup(functions, sources.modules, hidden(), sys.path))


def stack_in(log: str) -> str:
    """Return the frames of the reward function, innermost first, from faulthandler's dump of all threads."""
    for section in re.split(r"\n(?=Current thread|Thread )", log):
        frames = [line for line in section.splitlines() if line.startswith("  File ")]
        ours = next((i for i, line in enumerate(frames) if line.endswith(CALLERS)), None)
        if ours:
            return "Stack (most recent call first):\n" + "\n".join(frames[:ours]) + "\n"
    return ""
