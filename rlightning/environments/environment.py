"""The base class of environments: code that turns a prompt into trajectories by calling the policy."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Any, Protocol

from rlightning.environments.messages import AssistantMessage, Message
from rlightning.errors import cause_chain
from rlightning.types.trajectory import Outcome, Prompt, Sample

LIMIT_TEXT = "This model's maximum context length is"
"""Beginning of OpenAI's message for a sequence with the maximum length, by which clients recognize the error."""
OTHER_TRACEBACK = "During handling of the above exception, another exception occurred:"
"""Python's line between two tracebacks; the program ended with the error after the last one."""


class LimitReachedError(Exception):
    """The sequence has reached its maximum length. A trajectory that raises this is truncated, and is trained on."""


def is_limit(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, says that a request's sequence has reached the maximum length."""
    for one in cause_chain(error):
        said = str(one).rpartition(OTHER_TRACEBACK)[2]
        with suppress(Exception):  # clients such as httpx leave the response's text out of their errors
            said += one.response.text  # type: ignore[attr-defined]
        if isinstance(one, LimitReachedError) or LIMIT_TEXT in said:
            return True
    return False


class AskLimitError(Exception):
    """The conversation given to :meth:`Policy.ask` leaves no tokens for an answer; the trajectory may continue."""


class Reply(Sample):
    """A turn of the policy: the sample, and its tokens parsed to a message."""

    __slots__ = ("message",)

    def __init__(self, sample: Sample, message: AssistantMessage | None = None) -> None:
        super().__init__(
            sample.token_ids,
            sample.logprobs,
            sample.weight_versions,
            sample.text,
            sample.finish_reason,
            sample.supports,
        )
        self.message = message or AssistantMessage(sample.text)


class TrajectoryLostError(Exception):
    """A worker process died and its trajectory was lost; the trajectory may be requeued.

    Args:
        message: one line about the worker's end.
        details: further information, such as the stacks of the worker's threads.
        is_cause: whether this trajectory may have caused the process's end, rather than another trajectory.
    """

    def __init__(self, message: str, details: str = "", *, is_cause: bool = True) -> None:
        super().__init__(message)
        self.details, self.is_cause = details, is_cause


class Policy(Protocol):
    """What an environment calls to sample from the policy in one trajectory; every sampled token is recorded."""

    async def chat(self, *observations: Message, tools: Sequence[Message] | None = None) -> Reply:
        """Append messages to the trajectory, sample the policy's next turn, and return it.

        Args:
            observations: messages that follow the policy's last turn. In the first turn they replace the prompt, if
                there are any.
            tools: schemas, as in chat APIs, of tools that the policy may call. Given with the first turn, they hold for
                all turns. The reply's ``message`` contains the calls.

        Raises:
            LimitReachedError: the sequence has its maximum length.
        """

    async def ask(self, *messages: Message, temperature: float = 0.0, max_new_tokens: int | None = None) -> Reply:
        """Sample an answer of the policy to a separate conversation, such as a judge's, outside of the trajectory.

        The answer is not recorded, and not trained on.

        Args:
            messages: messages of the conversation.
            temperature: sampling temperature; 0 for greedy sampling.
            max_new_tokens: maximum tokens of the answer; None for the run's maximum.

        Raises:
            AskLimitError: the conversation leaves no room for an answer.
        """

    async def report(self, outcome: Outcome, state: object = None) -> None:
        """Report a preliminary outcome, which becomes the outcome if the trajectory times out.

        Args:
            outcome: the outcome with the rewards and metrics so far.
            state: returned by :meth:`resume` when a run is resumed from a checkpoint: texts, numbers, bytes, lists and
                mappings. None keeps the last one.

        Raises:
            TypeError: the state contains something else.
        """

    async def resume(self) -> Any:
        """Restore saved turns, and return the state reported with them; None for a new trajectory.

        Called before the first turn, by environments that report states.
        """

    async def sample(self, token_ids: Sequence[int]) -> Sample:
        """Sample the policy's next turn after a token sequence, and return the sample. A sequence that extends no
        recorded branch begins a new one.

        Args:
            token_ids: [L], the whole context.

        Raises:
            LimitReachedError: the sequence has its maximum length.
        """


class PolicyGroup(Protocol):
    """What an environment calls to sample the trajectories of one prompt."""

    async def sample_all(self) -> list[Outcome]:
        """Sample one turn for each trajectory in a single request; return the outcomes with which they end."""

    async def run_each(
        self,
        run: Callable[[Policy], Awaitable[Outcome]],
        places: AbstractAsyncContextManager[object] | None = None,
    ) -> list[Outcome]:
        """Call ``run`` for each trajectory concurrently, and return the outcomes in order. An error or a timeout ends
        its own trajectory alone; a RunError that concerns all trajectories is raised.

        Args:
            run: makes one trajectory.
            places: context manager that limits concurrency, such as a semaphore; a trajectory's deadline starts after
                it is entered.
        """


class Places:
    """Limits the number of concurrent trajectories on an event loop."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._here: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    def on_this_loop(self) -> asyncio.Semaphore:
        """Return the semaphore of the running event loop, which each trajectory acquires."""
        loop = asyncio.get_running_loop()
        if self._here is None or self._here[0] is not loop:
            self._here = loop, asyncio.Semaphore(self._number)
        return self._here[1]


class Environment:
    """Base class of environments, which make trajectories from prompts by calling the policy; a subclass defines
    :meth:`run`.

    An exception makes the trajectory fail, which then counts as not sampled: it enters no loss, baseline or mean. For
    mistakes of the policy, return a reward instead of raising an exception.

    Attributes:
        has_tools: whether the policy gets tools, which require a chat template that supports tool calls.
        runs_in_workers: whether the environment may run in a process other than the trainer's.
        truncates: whether requests may have their own ``top_p``, ``top_k`` or ``min_p``, for whose supports memory is
            planned.
        places: limit on concurrent trajectories; the time of waiting ones does not count. None for no limit.
    """

    has_tools = False
    runs_in_workers = True
    truncates = False
    places: Places | None = None

    async def check(self) -> None:
        """Raise a ConfigError if this environment cannot run, such as without its server; called before a run."""

    async def close(self) -> None:
        """Free resources; called when no trajectory is running. The environment may be used again afterwards."""

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        """Make one trajectory for a prompt by calling the policy, and return its outcome."""
        raise NotImplementedError(f"{type(self).__name__} does not define run(prompt, policy).")

    async def run_group(self, prompt: Prompt, group: PolicyGroup) -> list[Outcome]:
        """Make all trajectories of one prompt, by default each with :meth:`run`, and return the outcome of each."""
        places = None if self.places is None else self.places.on_this_loop()
        return await group.run_each(partial(self.run, prompt), places)
