"""Attempts in worker processes, with a policy that fails or never answers after its first turn."""

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from attempts import CannedPolicy

from rlightning.environments import AskLimitError, Message, Reply, WorkerEnvironment
from rlightning.environments.environment import TrajectoryLostError
from rlightning.types import Outcome, Prompt, Sample

DEEDS = "worker_cases.Deeds"


def make_prompt(text: str, **columns: Any) -> Prompt:
    return Prompt(3, text, [1, 2], columns)


def make(folder: Path, **arguments: Any) -> WorkerEnvironment:
    return WorkerEnvironment(DEEDS, {"folder": str(folder)}, **arguments)


class Replies(CannedPolicy):
    """Answers at once with one token, the first time; then it fails, or never answers.

    Attributes:
        num_cancelled: requests.
    """

    def __init__(self, text: str = "seven", error: Exception | None = None) -> None:
        super().__init__(text)
        self.error, self.num_sampled, self.num_cancelled = error, 0, 0

    async def ask(self, *messages: Message, temperature: float = 0.0, max_new_tokens: int | None = None) -> Reply:
        raise AskLimitError("9 tokens leave no room")

    async def sample(self, token_ids: Sequence[int]) -> Sample:
        self.num_sampled += 1
        if self.num_sampled > 1 and self.error is None:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                self.num_cancelled += 1
                await asyncio.sleep(0.2)  # a second cancellation would show
                raise
        if self.num_sampled > 1 and self.error is not None:
            raise self.error
        return await super().sample(token_ids)


async def attempt(environment: WorkerEnvironment, *deeds: str) -> list[Outcome]:
    async def run_one(deed: str) -> Outcome:
        try:
            return await environment.run(make_prompt(deed), Replies())
        except TrajectoryLostError as error:
            return Outcome(status="failed", error=error.details)

    return await asyncio.gather(*map(run_one, deeds))


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 300))
