"""Attempts at a prompt, with a policy or a sampler that says given texts."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from agent_cases import ScriptedSampler
from chat_templates import make_tokenizer
from stub_policy import StubPolicy
from waiting import PATIENCE_SECONDS, put_clock_forward

from rlightning.environments import Environment, LimitReachedError, Message, Reply
from rlightning.environments.chat_format import ChatFormat
from rlightning.environments.policy import GroupRequest
from rlightning.environments.recorded_group import RecordedGroup
from rlightning.rollout import Sampling
from rlightning.types import Outcome, Prompt, RolloutBatch, Sample, Trajectory

T = TypeVar("T")

SAMPLING = Sampling(max_new_tokens=16, seed=3)
LATE = 1000.0
"""Seconds of a deadline that has to pass: they go by at once on the event loop's clock."""
END = "<|im_end|>"
PROMPT = Prompt(3, "user: hi\nassistant: ", [1, 2], {"answer": "7"})


class CannedPolicy(StubPolicy):
    """Says given texts, the last one again and again, by one token each; remembers what it was told.

    Args:
        num_turns: that there is room for.
    """

    def __init__(self, *texts: str, num_turns: int = 99) -> None:
        self.texts, self.num_turns = texts or ("7",), num_turns
        self.heard: list[tuple[Message, ...]] = []

    async def chat(self, *observations: Message, tools: Sequence[Message] | None = None) -> Reply:
        if len(self.heard) == self.num_turns:
            raise LimitReachedError("9 tokens leave no room in 9.")
        self.heard.append(observations)
        return Reply(await self.sample([]))

    async def sample(self, token_ids: Sequence[int]) -> Sample:
        text = self.texts[min(len(self.heard), len(self.texts)) - 1]
        return Sample([7], [-0.1], [2], text, "stop")


class CannedSampler:
    """Answers each request with one token at once.

    Attributes:
        seeds: that it was asked with.
    """

    tokenizer: Any = None

    def __init__(self) -> None:
        self.seeds: list[int | None] = []

    async def sample(self, token_ids: Any, sampling: Sampling, **settings: Any) -> list[Sample]:
        self.seeds.append(sampling.seed)
        return [Sample([7], [-0.1], [2], "7", "stop")]


def say(*texts: str, family: str = "qwen2.5", error: Exception | None = None) -> ScriptedSampler:
    """A sampler that says texts, or raises an error."""
    sampler = ScriptedSampler(make_tokenizer(family), *texts, end=END)
    sampler.error = error
    return sampler


def write_call(name: str, /, **arguments: Any) -> str:
    """A call of a tool, as Qwen's models write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answers(trajectory: Trajectory) -> list[str]:
    """What its tools returned."""
    return [turn.message["content"] for turn in trajectory.turns if turn.message["role"] == "tool"]


def make_group(
    sampler: Any,
    prompt: Prompt,
    number: int = 1,
    *,
    sampling: Sampling = SAMPLING,
    chat_format: ChatFormat | None = None,
    max_length: int = 512,
    timeout: float | None = PATIENCE_SECONDS,
    **limits: Any,
) -> RecordedGroup:
    """The trajectories of a prompt."""
    request = GroupRequest(prompt, sampling, number)
    return RecordedGroup(sampler, chat_format or ChatFormat(sampler.tokenizer), request, max_length, timeout, **limits)


async def run_group(environment: Environment, group: RecordedGroup, prompt: Prompt) -> list[Trajectory]:
    """Make them; they can be trained."""
    trajectories = group.finish(await environment.run_group(prompt, group), 0.0)
    RolloutBatch.pack([[one for one in trajectories if one.branches]])
    return trajectories


async def run_late(making: Awaitable[T], is_due: Callable[[], bool], end: Callable[[], object] = lambda: None) -> T:
    """Await something whose deadline passes once ``is_due`` holds; ``end`` is called after that."""
    task = asyncio.ensure_future(making)
    while not is_due():
        assert not task.done(), task.result()
        await asyncio.sleep(0.01)
    put_clock_forward(asyncio.get_running_loop(), LATE)
    await asyncio.sleep(0.01)  # due after the deadline
    end()
    return await task


def play(environment: Environment, policy: CannedPolicy | None = None, prompt: Prompt = PROMPT) -> Outcome:
    """What the environment makes of one trajectory with a policy."""
    return asyncio.run(environment.run(prompt, policy or CannedPolicy()))


def attempt(
    environment: Environment,
    sampler: Any,
    prompt: Prompt,
    number: int = 1,
    *,
    is_due: Callable[[], bool] | None = None,
    **settings: Any,
) -> list[Trajectory]:
    """Make the trajectories of a prompt, and close the environment; with ``is_due``, as :func:`run_late` does."""
    group = make_group(sampler, prompt, number, **settings)

    async def run() -> list[Trajectory]:
        await environment.check()
        try:
            making = run_group(environment, group, prompt)
            return await (making if is_due is None else run_late(making, is_due))
        finally:
            await environment.close()

    return asyncio.run(run())
