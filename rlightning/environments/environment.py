"""The base class of environments: code that turns a prompt into trajectories by calling the policy."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Protocol

from rlightning.environments.messages import AssistantMessage, Message
from rlightning.types.trajectory import Outcome, Prompt, Sample


class LimitReachedError(Exception):
    """The sequence has no room for another turn. A trajectory that ends with this error is truncated, and trained."""


class AskLimitError(Exception):
    """The conversation given to :meth:`Policy.ask` leaves no room for an answer; the trajectory can go on."""


class Reply(Sample):
    """A turn of the policy's: the sample, and the message that its tokens encode."""

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
        message: a line that says how.
        details: what else is known, such as the stacks of the worker's threads.
        is_cause: whether it may have been the trajectory that ended the process, rather than another one.
    """

    def __init__(self, message: str, details: str = "", *, is_cause: bool = True) -> None:
        super().__init__(message)
        self.details, self.is_cause = details, is_cause


class Policy(Protocol):
    """The policy, as one trajectory uses it; every sampled token is recorded unchanged."""

    async def chat(self, *observations: Message, tools: Sequence[Message] | None = None) -> Reply:
        """Sample the policy's next turn.

        Args:
            observations: messages that follow the policy's last turn. Its first turn answers the prompt if there are
                none, and otherwise the messages in place of the prompt.
            tools: schemas, as in chat APIs, of tools that the policy may call; given with the first turn, they hold for
                all. The reply's ``message`` has the calls.

        Raises:
            LimitReachedError: the sequence is as long as it may be.
        """

    async def ask(self, *messages: Message, temperature: float = 0.0, max_new_tokens: int | None = None) -> Reply:
        """Sample an answer of the policy to a separate conversation, such as a judge's, outside of the trajectory.

        What it samples is not recorded, and not trained.

        Args:
            messages: of the conversation.
            temperature: that the answer is sampled at; 0: the most likely token each time.
            max_new_tokens: that the answer is cut at; None: the run's.

        Raises:
            AskLimitError: the conversation is as long as a sequence may be.
        """

    async def report(self, outcome: Outcome, state: object = None) -> None:
        """Report a preliminary outcome, which is kept if the trajectory times out.

        Args:
            outcome: with the rewards and metrics so far.
            state: from which :meth:`resume` goes on here, where a run is resumed from a checkpoint: texts, numbers,
                bytes, lists and mappings. None: the one before stays.

        Raises:
            TypeError: the state holds something else.
        """

    async def resume(self) -> Any:
        """Return the state that a checkpoint saved, with the turns that were sampled up to it; None for a new start.

        Called before the first turn, by an environment that hands over states; None: the trajectory begins.
        """

    async def sample(self, token_ids: Sequence[int]) -> Sample:
        """Sample the policy's next turn from a token sequence; one that rewrites the history begins a new branch.

        Args:
            token_ids: all that the policy reads.

        Raises:
            LimitReachedError: the sequence is as long as it may be.
        """


class PolicyGroup(Protocol):
    """The policy, as the trajectories of one prompt use it."""

    async def sample_all(self) -> list[Outcome]:
        """Sample one turn for each trajectory in a single request; returns the outcomes, as all have ended."""

    async def run_each(
        self,
        run: Callable[[Policy], Awaitable[Outcome]],
        places: AbstractAsyncContextManager[object] | None = None,
    ) -> list[Outcome]:
        """Call ``run`` for each trajectory concurrently; an error or a timeout affects its own trajectory alone.

        Args:
            run: makes the trajectory of a policy.
            places: such as a semaphore; each trajectory enters it before its time begins to count.
        """


class Places:
    """A limit on how many trajectories of an event loop run at once."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._here: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    def on_this_loop(self) -> asyncio.Semaphore:
        """Return the running event loop's semaphore, which each trajectory enters."""
        loop = asyncio.get_running_loop()
        if self._here is None or self._here[0] is not loop:
            self._here = loop, asyncio.Semaphore(self._number)
        return self._here[1]


class Environment:
    """Makes trajectories; a subclass defines :meth:`run`.

    An exception in it is a failure of the trajectory, which then counts as not sampled: it reaches no loss, baseline or
    mean. What the policy did wrong is no exception, but a reward.

    Attributes:
        has_tools: whether it gives the policy tools, for which a model needs a chat template that writes calls.
        runs_in_workers: whether it may run in another process than the trainer's.
        places: for its trajectories; the others wait, and their time does not count yet. None: all run at once.
    """

    has_tools = False
    runs_in_workers = True
    places: Places | None = None

    async def check(self) -> None:
        """Raise a :class:`~rlightning.errors.ConfigError` if this cannot run here; called before a run starts."""

    async def close(self) -> None:
        """Free resources; called when no trajectory is running. The environment may be used again afterwards."""

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        """Make one trajectory."""
        raise NotImplementedError(f"{type(self).__name__} does not define run(prompt, policy).")

    async def run_group(self, prompt: Prompt, group: PolicyGroup) -> list[Outcome]:
        """Make all trajectories of one prompt, by default each with :meth:`run`, and return the outcome of each."""
        places = None if self.places is None else self.places.on_this_loop()
        return await group.run_each(partial(self.run, prompt), places)
