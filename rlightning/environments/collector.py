"""The collector: prompts in, finished groups out, in the order in which they finish.

What waits runs on one event loop in a thread of its own; the trainer's thread hands in requests and takes what is
finished. Only plain data goes from one to the other.
"""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from rlightning.rollout import Sampler, Sampling
from rlightning.types import Sample


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """One prompt to complete.

    Attributes:
        token_ids: [P], the prompt.
        sampling: how; its seed is the group's own.
        num_samples: completions.
    """

    token_ids: Sequence[int]
    sampling: Sampling
    num_samples: int


class Collector:
    """Keeps prompts in flight at a sampler.

    Args:
        sampler: completes them.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="collector", daemon=True)
        self._thread.start()

    def collect(self, requests: Sequence[GroupRequest]) -> Iterator[tuple[int, list[Sample]]]:
        """Complete requests; what is under way when the caller stops taking is cancelled.

        Yields:
            The place of a request, and its completions, as soon as all of them are there.

        Raises:
            EngineError: the sampler cannot go on.
        """
        finished: SimpleQueue[tuple[int, list[Sample]] | BaseException] = SimpleQueue()
        work = asyncio.run_coroutine_threadsafe(self._collect(requests, finished), self._loop)
        try:
            for _ in requests:
                group = finished.get()
                if isinstance(group, BaseException):
                    raise group
                yield group
        finally:
            work.cancel()

    def close(self) -> None:
        """End the thread. May be called twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _collect(
        self,
        requests: Sequence[GroupRequest],
        finished: "SimpleQueue[tuple[int, list[Sample]] | BaseException]",
    ) -> None:
        async def complete(place: int, request: GroupRequest) -> None:
            completions = await self.sampler.sample(
                request.token_ids, request.sampling, num_samples=request.num_samples, session=None
            )
            finished.put((place, completions))

        try:
            await asyncio.gather(*(complete(place, request) for place, request in enumerate(requests)))
        except Exception as error:
            finished.put(error)
