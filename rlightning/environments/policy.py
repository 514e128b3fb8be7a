"""The policy over a sampler, in the trajectories of a prompt: it records exactly what was sampled.

A trajectory's token sequence only grows: what the policy sampled stays as it was sampled, and observations are
tokenized alone, in the form that the chat template gives them. A caller that rewrites the history begins a new branch,
in which nothing of before is trained again.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from rlightning.environments.environment import LimitReachedError, Message, Policy
from rlightning.environments.recorder import Recorder
from rlightning.errors import RequestRefusedError, RunError
from rlightning.foreign_text import cut, cut_line, describe_error
from rlightning.rollout import Sampling, TokenSampler
from rlightning.seeds import mix_seed
from rlightning.types.trajectory import BranchReason, Outcome, Prompt, Sample, Trajectory

log = logging.getLogger(__name__)

_ANSWER = "ANSWER OF THE POLICY"
"""Stands for its last turn where a chat template is asked what follows that."""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """One prompt to attempt.

    Attributes:
        prompt: the one.
        sampling: how; its seed is the group's own.
        num_trajectories: attempts.
    """

    prompt: Prompt
    sampling: Sampling
    num_trajectories: int


class RecordedPolicy:
    """A :class:`~rlightning.environments.environment.Policy` that records one trajectory.

    Args:
        sampler: samples.
        tokenizer: the policy's.
        request: the group's.
        number: of the trajectory in its group.
        max_length: tokens of the longest sequence.

    Attributes:
        temperature: that all of its turns are sampled at in place of the prompt's or the run's; None: that one.
        has_reached_limit: whether the last request was longer than a sequence may be.
    """

    def __init__(
        self, sampler: TokenSampler, tokenizer: Any, request: GroupRequest, number: int, max_length: int
    ) -> None:
        self.tokenizer, self.max_length, self.recorder = tokenizer, max_length, Recorder()
        self.temperature: float | None = None
        self.has_reached_limit = False
        self._sampler, self._request, self._number = sampler, request, number
        self._session = secrets.token_hex(8)
        self._num_requested = 0

    @property
    def sampling(self) -> Sampling:
        """How its turns are sampled."""
        return self._request.sampling

    async def chat(self, *observations: Message) -> Sample:
        """See :meth:`Policy.chat`."""
        recorder = self.recorder
        if recorder.branches:
            last = next(turn.sample for turn in reversed(recorder.turns) if turn.sample is not None)
            added = render_observations(self.tokenizer, observations, last)
            history = [*recorder.branches[-1].token_ids, *added]
        elif observations:
            history = render_messages(self.tokenizer, observations)
        else:
            history = self._request.prompt.token_ids
        (sample,) = await self.sample_turns(history, self.sampling, observations=observations)
        return sample

    async def sample(self, token_ids: Sequence[int]) -> Sample:
        """See :meth:`Policy.sample`."""
        (sample,) = await self.sample_turns(token_ids, self.sampling)
        return sample

    async def sample_turns(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        num_samples: int = 1,
        reason: BranchReason | None = None,
        observations: Sequence[Mapping[str, Any]] = (),
        to_message: Callable[[Sample], dict[str, Any]] | None = None,
    ) -> list[Sample]:
        """Sample turns that all follow one history, and record them. May be called while other calls are under way.

        Args:
            token_ids: [L], the history. What goes on from the end of a branch extends it.
            sampling: how; a seed of its own is mixed with nothing.
            num_samples: turns; each but the first begins a branch.
            reason: why a branch begins if the history extends none; None: as far as the tokens tell.
            observations: messages that the history ends with, for the trajectory's turns.
            to_message: makes the message of a sample; None: its text.

        Raises:
            LimitReachedError: the history is as long as it may be.
        """
        room = self.max_length - len(token_ids)
        if room < 1:
            self.has_reached_limit = True
            raise LimitReachedError(f"{len(token_ids)} tokens leave no room in {self.max_length}.")
        sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))
        if sampling.seed is not None and sampling.seed == self.sampling.seed:
            # The first turn draws what it would if the group were sampled by one request.
            seed, is_first = sampling.seed + self._number, self._num_requested == 0 and num_samples == 1
            sampling = replace(sampling, seed=seed if is_first else mix_seed(seed, "turn", self._num_requested))
        self._num_requested += num_samples
        reservation = self.recorder.reserve(token_ids, reason)
        try:
            samples = await self._sampler.sample(token_ids, sampling, num_samples=num_samples, session=self._session)
            messages = None if to_message is None else [to_message(sample) for sample in samples]
        except BaseException:
            self.recorder.release(reservation)
            raise
        self.recorder.record(reservation, samples, observations, messages)
        self.has_reached_limit = False
        return samples

    def record(self, token_ids: Sequence[int], sample: Sample) -> None:
        """Add a turn that was sampled after ``token_ids``."""
        self.recorder.record(self.recorder.reserve(token_ids), [sample])

    def finish(self, outcome: Outcome, seconds: float) -> Trajectory:
        """Return the trajectory; one that a limit on tokens has cut is truncated.

        Args:
            outcome: what the environment has returned.
            seconds: that it took.
        """
        prompt, turns = self._request.prompt, self.recorder.turns
        samples = [turn.sample for turn in turns if turn.sample is not None]
        is_cut = self.has_reached_limit or bool(samples and samples[-1].is_truncated)
        return Trajectory(
            prompt if self.temperature is None else prompt._replace(temperature=self.temperature),
            tuple(self.recorder.branches),
            tuple(turns),
            "truncated" if outcome.status == "finished" and is_cut else outcome.status,
            reward=outcome.reward,
            turn_rewards=outcome.turn_rewards,
            metrics=outcome.metrics,
            timings={"trajectory": seconds},
            error=outcome.error,
        )


class RecordedGroup:
    """A :class:`~rlightning.environments.environment.PolicyGroup` that records the trajectories of a prompt.

    Args:
        sampler: as of :class:`RecordedPolicy`.
        tokenizer: as of it.
        request: as of it.
        max_length: as of it.
        timeout: seconds that a trajectory may take; None: any time.
    """

    def __init__(
        self, sampler: TokenSampler, tokenizer: Any, request: GroupRequest, max_length: int, timeout: float | None
    ) -> None:
        self._sampler, self._request, self._timeout = sampler, request, timeout
        numbers = range(request.num_trajectories)
        self._policies = [RecordedPolicy(sampler, tokenizer, request, number, max_length) for number in numbers]

    async def sample_all(self) -> list[Outcome]:
        """See :meth:`PolicyGroup.sample_all`."""
        token_ids, sampling = self._request.prompt.token_ids, self._request.sampling
        samples = await self._sampler.sample(token_ids, sampling, num_samples=len(self._policies), session=None)
        for policy, sample in zip(self._policies, samples, strict=True):
            policy.record(token_ids, sample)
        return [Outcome() for _ in samples]

    async def run_each(
        self,
        run: Callable[[Policy], Awaitable[Outcome]],
        places: AbstractAsyncContextManager[object] | None = None,
    ) -> list[Outcome]:
        """See :meth:`PolicyGroup.run_each`."""

        async def run_in_place(policy: Policy) -> Outcome:
            async with places or nullcontext():
                return await self._run(run, policy)

        return await asyncio.gather(*map(run_in_place, self._policies))

    async def _run(self, run: Callable[[Policy], Awaitable[Outcome]], policy: Policy) -> Outcome:
        try:
            async with asyncio.timeout(self._timeout) as deadline:
                return await run(policy)
        except LimitReachedError:
            return Outcome(status="truncated")
        except (asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            # Of the environment's own, which would end the loop, or reach the trainer without a text.
            return failed_outcome(self._request.prompt, f"it raised {describe_error(error)}")
        except Exception as error:
            if isinstance(error, RunError) and not isinstance(error, RequestRefusedError):
                raise  # such as the sampler's: no trajectory can go on
            if isinstance(error, TimeoutError) and deadline.expired():
                return Outcome(status="timeout", error=f"It took more than {self._timeout:g} s.")
            return failed_outcome(self._request.prompt, error)

    def finish(self, outcomes: Sequence[Outcome], seconds: float) -> list[Trajectory]:
        """Return the trajectories.

        Args:
            outcomes: of each.
            seconds: that the group took.
        """
        pairs = zip(self._policies, outcomes, strict=True)
        return [policy.finish(outcome, seconds) for policy, outcome in pairs]


def failed_outcome(prompt: Prompt, error: Exception | str, details: str = "") -> Outcome:
    """Return the outcome of a trajectory whose environment has failed, which counts as not sampled; log the error.

    Args:
        prompt: of the trajectory.
        error: that its environment has raised, or a line that says what happened.
        details: the error as the trajectory has it, such as with its traceback; "": the line.
    """
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    log.warning("A trajectory of prompt %d failed and counts as not sampled: %s", prompt.index, cut_line(text))
    log.debug("Of prompt %d: %s", prompt.index, details, exc_info=error if isinstance(error, Exception) else None)
    return Outcome(status="failed", error=cut(details) or text)


def render_messages(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Return the tokens of a chat up to the beginning of the policy's first turn.

    Args:
        tokenizer: the policy's. Without a chat template the messages' contents follow each other as they are.
        messages: of the chat.
    """
    has_template = tokenizer.chat_template is not None
    if has_template:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    else:
        text = "".join(message["content"] for message in messages)
    token_ids: list[int] = tokenizer(text, add_special_tokens=not has_template).input_ids
    return token_ids


def render_observations(tokenizer: Any, observations: Sequence[Message], last: Sample) -> list[int]:
    """Return the tokens from the end of the policy's last turn to the beginning of its next one.

    Args:
        tokenizer: the policy's. Without a chat template the messages' contents follow as they are.
        observations: messages.
        last: the policy's last turn. If it ended with the token that ends a turn of the chat, that is not repeated.
    """
    if tokenizer.chat_template is None:
        text = "".join(message["content"] for message in observations)
    else:
        chat = [{"role": "user", "content": ""}, {"role": "assistant", "content": _ANSWER}, *observations]
        rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        text = rendered.rpartition(_ANSWER)[2]
    token_ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    is_ended = bool(token_ids) and last.token_ids[-1] == token_ids[0]
    return token_ids[is_ended:]
