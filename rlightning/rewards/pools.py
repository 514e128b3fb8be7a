"""What the calls of a runner run in: worker processes, and for functions that cannot be sent there, this process."""

import queue
from collections.abc import Collection, Sequence

from rlightning.rewards.async_pool import AsyncPool
from rlightning.rewards.calls import Answered, Call
from rlightning.rewards.config import BoundReward
from rlightning.rewards.event_loop import EventLoopPool, LoopFunction
from rlightning.rewards.loop_thread import BEAT
from rlightning.rewards.pool import WorkerPool
from rlightning.rewards.sources import KeptSources, install
from rlightning.rewards.worker import WorkerFunction


class Pools:
    """The pools of a runner, and the queue that their answers come in by.

    Args:
        functions: those that calls name by their index.
        sources: of the functions.
        num_workers: processes of sync functions, and threads of this process, at once.
    """

    def __init__(self, functions: Sequence[BoundReward], sources: KeptSources, num_workers: int) -> None:
        self.answers: queue.SimpleQueue[Answered | BaseException] = queue.SimpleQueue()
        self._functions = functions
        sent = [WorkerFunction(f.pickled, f.timeout) if f.pickled else None for f in functions]
        is_async = [f.is_async for f in functions]
        self._sync = WorkerPool(
            [None if other else f for f, other in zip(sent, is_async, strict=True)],
            sources,
            num_workers,
            self.answers.put,
        )
        self._async = AsyncPool(
            [f if own else None for f, own in zip(sent, is_async, strict=True)], sources, self.answers.put
        )
        self._here = EventLoopPool(
            [None if f.pickled else LoopFunction(f.function, f.is_async, f.timeout) for f in functions],
            num_workers,
            self.answers.put,
        )
        self._finder = None if all(f.pickled for f in functions) else install(sources.modules)

    def submit(self, calls: Sequence[Call]) -> None:
        """Start calls, each where its function runs, and return at once."""
        of: dict[WorkerPool | AsyncPool | EventLoopPool, list[Call]] = {self._sync: [], self._async: [], self._here: []}
        for call in calls:
            function = self._functions[call.function]
            sent_to = self._async if function.is_async else self._sync
            of[sent_to if function.pickled else self._here].append(call)
        for pool, own in of.items():
            pool.submit(own)

    def get(self) -> Answered | None:
        """The next answer, or None if none has come within :data:`BEAT`.

        Raises:
            BaseException: that ended the work of a pool.
        """
        try:
            answer = self.answers.get(timeout=BEAT)
        except queue.Empty:
            self._here.replace_if_blocked()
            return None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def withdraw(self, samples: Collection[int]) -> None:
        """End the calls on some samples, and those that have not begun."""
        if samples:
            for pool in (self._sync, self._async, self._here):
                pool.withdraw(samples)

    def close(self) -> None:
        """End the processes and the calls on the loop."""
        for pool in (self._sync, self._async, self._here):
            pool.close()
        if self._finder is not None:
            self._finder.remove()
