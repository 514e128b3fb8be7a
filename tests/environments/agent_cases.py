"""A policy behind an endpoint, with what it samples given, and agents that use it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import openai
from waiting import PATIENCE_SECONDS

from rlightning.environments.chat_format import ChatFormat
from rlightning.environments.endpoint import Endpoint, Session
from rlightning.environments.policy import GroupRequest, RecordedPolicy
from rlightning.rollout import OnTokens, Sampling
from rlightning.types import Outcome, Prompt, RolloutBatch, Sample, Trajectory


class ScriptedSampler:
    """Samples given texts, one after the other, each ended by a token unless it is cut.

    Attributes:
        histories: that it was asked to continue.
        cancelled: requests that were cancelled.
        follows_schemas: whether it takes schemas, which change nothing.
    """

    follows_schemas = False

    def __init__(self, tokenizer: Any, *texts: str, end: str = "", delay: float = 0.0) -> None:
        self.tokenizer, self.texts, self.end, self.delay = tokenizer, list(texts), end, delay
        self.histories: list[list[int]] = []
        self.samplings: list[Sampling] = []
        self.error: Exception | None = None
        self.cancelled = 0

    async def sample(
        self, token_ids: Sequence[int], sampling: Sampling, *, num_samples: int = 1, **settings: Any
    ) -> list[Sample]:
        self.histories.append(list(token_ids))
        self.samplings.append(sampling)
        texts = [self.texts.pop(0) for _ in range(num_samples)] if self.error is None else []
        try:
            await asyncio.sleep(self.delay)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return [self.make_sample(text) for text in texts]

    def make_sample(self, text: str) -> Sample:
        ids = self.tokenizer(text + self.end, add_special_tokens=False).input_ids
        return Sample(ids, [-0.5] * len(ids), [2] * len(ids), text, "stop")


class StreamingSampler(ScriptedSampler):
    """Gives the tokens of its samples one by one, and stops before the last ones until it is released.

    Attributes:
        num_held: tokens of each sample that come when it is whole.
        released: set when the samples may be whole.
        ended: set when a request was cancelled.
    """

    num_held = 1

    def __init__(self, tokenizer: Any, *texts: str, **settings: Any) -> None:
        super().__init__(tokenizer, *texts, **settings)
        self.released, self.ended = asyncio.Event(), asyncio.Event()

    async def sample(
        self, token_ids: Sequence[int], sampling: Sampling, *, on_tokens: OnTokens | None = None, **settings: Any
    ) -> list[Sample]:
        if on_tokens is None:
            return await super().sample(token_ids, sampling, **settings)
        error, self.error = self.error, None
        samples = await super().sample(token_ids, sampling, **settings)
        for number, sample in enumerate(samples):
            for token in sample.token_ids[: -self.num_held]:
                on_tokens(number, [token])
        try:
            await self.released.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            self.ended.set()
            raise
        if error is not None:
            raise error
        return samples


def make_policy(sampler: Any, tokenizer: Any, prompt: Prompt | None = None, **arguments: Any) -> RecordedPolicy:
    prompt = prompt or Prompt(0, "hi", [1, 2], {"prompt": "hi"})
    sampling = Sampling(**{"max_new_tokens": 64, "seed": 11, **arguments.pop("sampling", {})})
    max_length = arguments.pop("max_length", 4096)
    return RecordedPolicy(sampler, ChatFormat(tokenizer), GroupRequest(prompt, sampling, 2), 0, max_length)


@asynccontextmanager
async def serve(policy: RecordedPolicy, **arguments: Any) -> AsyncIterator[tuple[Session, str]]:
    """A session of an endpoint, and the endpoint's address."""
    endpoint = Endpoint(**arguments)
    try:
        async with endpoint.open(policy) as session:
            yield session, endpoint.url
    finally:
        await endpoint.close()


def connect(session: Session, url: str, **arguments: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=session.key, **arguments)


def finish(policy: RecordedPolicy) -> Trajectory:
    """The trajectory, of which each sampled token is trained in exactly one branch."""
    trajectory = policy.finish(Outcome(reward=1.0), 0.1)
    RolloutBatch.pack([[trajectory]])
    return trajectory


def run(policy: RecordedPolicy, use: Callable[[openai.AsyncOpenAI], Any], **arguments: Any) -> Trajectory:
    """Have a client use the policy."""

    async def talk() -> None:
        async with serve(policy, **arguments) as (session, url), connect(session, url) as client:
            await use(client)

    asyncio.run(asyncio.wait_for(talk(), PATIENCE_SECONDS))
    return finish(policy)


def texts(trajectory: Trajectory, tokenizer: Any) -> list[str]:
    """What each branch is, as text."""
    return [tokenizer.decode(list(branch.token_ids)) for branch in trajectory.branches]


def trained(trajectory: Trajectory, tokenizer: Any) -> list[str]:
    """What is trained in each branch, as text."""
    return [
        tokenizer.decode([t for t, mine in zip(branch.token_ids, branch.is_sampled, strict=True) if mine])
        for branch in trajectory.branches
    ]
