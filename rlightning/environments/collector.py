"""The collector: prompts in, finished groups of trajectories out, in the order in which they finish.

What waits, environments and requests to the sampler, runs on one event loop in a thread of its own; the trainer's
thread hands in requests and takes what is finished. Only plain data goes from one to the other.
"""

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from rlightning import intervals
from rlightning.environments.environment import Environment
from rlightning.environments.policy import GroupRequest, RecordedGroup, failed_outcome
from rlightning.environments.single_turn import SingleTurn
from rlightning.errors import ConfigError, EngineError
from rlightning.rollout import Sampler
from rlightning.types.trajectory import Prompt, Trajectory

COLUMN = "environment"
"""Of a prompt set, that names the environment of each row where a run has several."""


class Collector:
    """Keeps prompts in flight at their environments.

    Args:
        sampler: samples the policy's turns.
        tokenizer: the policy's.
        environments: one, or several by the names that prompts have in their column ``environment``; None: SingleTurn.
        max_length: tokens of the longest sequence.
        timeout: seconds that a trajectory may take; None: any time.
    """

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: Any,
        environments: Environment | Mapping[str, Environment] | None = None,
        *,
        max_length: int,
        timeout: float | None = None,
    ) -> None:
        self._sampler, self._tokenizer = sampler, tokenizer
        self._environments = SingleTurn() if environments is None else environments
        self._max_length, self._timeout = max_length, timeout
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="collector", daemon=True)
        self._thread.start()

    def collect(self, requests: Sequence[GroupRequest]) -> Iterator[tuple[int, list[Trajectory]]]:
        """Attempt prompts; what is under way when the caller stops taking is cancelled.

        Yields:
            The place of a request, and its trajectories, as soon as all of them have ended.

        Raises:
            ConfigError: a prompt names no environment of the run.
            EngineError: the sampler cannot go on.
        """
        environments = [find_environment(self._environments, request.prompt) for request in requests]
        finished: SimpleQueue[tuple[int, list[Trajectory]] | BaseException] = SimpleQueue()
        work = asyncio.run_coroutine_threadsafe(self._collect(requests, environments, finished), self._loop)
        try:
            for _ in requests:
                group = finished.get()
                if isinstance(group, BaseException):
                    raise group
                yield group
        except BaseException:
            work.cancel()
            raise
        work.result()

    def close(self) -> None:
        """Cancel what is under way, and end the thread. May be called twice."""
        if self._thread.is_alive():
            with suppress(TimeoutError):  # an environment may ignore that it is cancelled
                asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(intervals.CANCEL_GRACE)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _collect(
        self,
        requests: Sequence[GroupRequest],
        environments: Sequence[Environment],
        finished: "SimpleQueue[tuple[int, list[Trajectory]] | BaseException]",
    ) -> None:
        async def attempt(place: int) -> None:
            finished.put((place, await self._attempt(requests[place], environments[place])))

        try:
            await asyncio.gather(*(attempt(place) for place in range(len(requests))))
        except Exception as error:  # the trainer's thread raises it
            finished.put(error)

    async def _attempt(self, request: GroupRequest, environment: Environment) -> list[Trajectory]:
        begun = time.monotonic()
        group = RecordedGroup(self._sampler, self._tokenizer, request, self._max_length, self._timeout)
        try:
            outcomes = await environment.run_group(request.prompt, group)
        except EngineError:
            raise  # the sampler's, which no trajectory can go on without
        except Exception as error:  # user code
            outcomes = [failed_outcome(request.prompt, error)] * request.num_trajectories
        return group.finish(outcomes, time.monotonic() - begun)


async def _cancel_others() -> None:
    """Cancel all other tasks of this loop, and wait until they have ended."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


def find_environment(environments: Environment | Mapping[str, Environment], prompt: Prompt) -> Environment:
    """Return a prompt's environment.

    Raises:
        ConfigError: its row names none of several.
    """
    if isinstance(environments, Environment):
        return environments
    name = prompt.columns.get(COLUMN)
    environment = environments.get(str(name))
    if environment is None:
        raise ConfigError(
            f"Prompt {prompt.index} has {COLUMN}={name!r}, which is none of the run's: {', '.join(environments)}. "
            "Name one of them in each row."
        )
    return environment
