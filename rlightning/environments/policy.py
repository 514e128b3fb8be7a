"""The policy over a sampler, in the trajectories of a prompt: it records exactly what was sampled.

A trajectory's token sequence only grows: what the policy sampled stays as it was sampled, and observations are
tokenized alone, in the form that the chat template gives them. A caller that rewrites the history begins a new branch,
in which nothing of before is trained again.
"""

import asyncio
import logging
import math
import secrets
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rlightning.environments.environment import LimitReachedError, Message, Policy, TrajectoryLostError
from rlightning.errors import RequestRefusedError, RunError
from rlightning.foreign_text import cut, cut_line, describe_error
from rlightning.rollout import Sampling, TokenSampler
from rlightning.seeds import mix_seed
from rlightning.types.trajectory import Branch, Outcome, Prompt, Sample, Trajectory, Turn

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
        attempt: at the trajectory, from 0; each draws other random numbers.
    """

    def __init__(
        self,
        sampler: TokenSampler,
        tokenizer: Any,
        request: GroupRequest,
        number: int,
        max_length: int,
        attempt: int = 0,
    ) -> None:
        self._sampler, self._tokenizer, self._request = sampler, tokenizer, request
        self._number, self._max_length, self._attempt = number, max_length, attempt
        self._session = secrets.token_hex(8)
        self._branches: list[Branch] = []
        self._turns: list[Turn] = []
        self._has_reached_limit = False

    async def chat(self, *observations: Message) -> Sample:
        """See :meth:`Policy.chat`."""
        if self._branches:
            last = next(turn.sample for turn in reversed(self._turns) if turn.sample is not None)
            added = render_observations(self._tokenizer, observations, last)
            history = [*self._branches[-1].token_ids, *added]
        elif observations:
            history = render_messages(self._tokenizer, observations)
        else:
            history = self._request.prompt.token_ids
        self._turns += [Turn(dict(message)) for message in observations]
        return await self.sample(history)

    async def sample(self, token_ids: Sequence[int]) -> Sample:
        """See :meth:`Policy.sample`."""
        sampling = self._request.sampling
        room = self._max_length - len(token_ids)
        if room < 1:
            self._has_reached_limit = True
            raise LimitReachedError(f"{len(token_ids)} tokens leave no room in {self._max_length}.")
        sample = await self._request_sample(
            token_ids, replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))
        )
        self.record(token_ids, sample)
        return sample

    async def _request_sample(self, token_ids: Sequence[int], sampling: Sampling) -> Sample:
        num_sampled = sum(turn.sample is not None for turn in self._turns)
        if sampling.seed is not None:
            # The first turn draws what it would if the group were sampled by one request.
            seed = sampling.seed + self._number
            seed = mix_seed(seed, "attempt", self._attempt) if self._attempt else seed
            sampling = replace(sampling, seed=mix_seed(seed, "turn", num_sampled) if num_sampled else seed)
        (sample,) = await self._sampler.sample(token_ids, sampling, num_samples=1, session=self._session)
        return sample

    def record(self, token_ids: Sequence[int], sample: Sample) -> None:
        """Add a turn that was sampled after ``token_ids``."""
        known = self._branches[-1].token_ids if self._branches else []
        is_continued = bool(self._branches) and list(token_ids[: len(known)]) == list(known)
        if not is_continued:
            self._branches.append(Branch("history rewritten" if self._branches else "start"))
            known = []
        branch = self._branches[-1]
        if len(token_ids) > len(known):
            branch.append(list(token_ids[len(known) :]), len(self._turns) - 1 if is_continued else -1)
        branch.append_sample(sample, len(self._turns))
        self._turns.append(Turn({"role": "assistant", "content": sample.text}, sample))

    def finish(self, outcome: Outcome, seconds: float) -> Trajectory:
        """Return the trajectory; one that a limit on tokens has cut is truncated, and rewards of turns alone are added.

        Args:
            outcome: what the environment has returned.
            seconds: that it took.
        """
        samples = [turn.sample for turn in self._turns if turn.sample is not None]
        is_cut = self._has_reached_limit or bool(samples and samples[-1].is_truncated)
        reward, turn_rewards = outcome.reward, outcome.turn_rewards
        return Trajectory(
            self._request.prompt,
            tuple(self._branches),
            tuple(self._turns),
            "truncated" if outcome.status == "finished" and is_cut else outcome.status,
            reward=math.fsum(turn_rewards) if reward is None and turn_rewards else reward,
            turn_rewards=turn_rewards,
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
        max_requeues: how often a trajectory that was lost with its worker is made again.

    Attributes:
        num_requeues: of all trajectories.
        first_failure: of them in a line, and its traceback; None without any.
    """

    def __init__(
        self,
        sampler: TokenSampler,
        tokenizer: Any,
        request: GroupRequest,
        max_length: int,
        timeout: float | None,
        max_requeues: int = 0,
    ) -> None:
        self._sampler, self._request, self._timeout = sampler, request, timeout
        self._max_requeues = max_requeues
        self._make_policy = partial(RecordedPolicy, sampler, tokenizer, request, max_length=max_length)
        self._policies = [self._make_policy(number=number) for number in range(request.num_trajectories)]
        self.num_requeues = 0
        self.first_failure: tuple[str, str] | None = None

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

        async def run_in_place(number: int) -> Outcome:
            async with places or nullcontext():
                return await self._run_again(run, number)

        return await asyncio.gather(*map(run_in_place, range(len(self._policies))))

    async def _run_again(self, run: Callable[[Policy], Awaitable[Outcome]], number: int) -> Outcome:
        """Make a trajectory, again if it was lost: within the budget, unless another one is known to be the cause."""
        attempt = num_caused = 0
        while True:
            try:
                return await self._run(run, self._policies[number])
            except TrajectoryLostError as error:
                num_caused += error.is_cause
                if num_caused > self._max_requeues:
                    return self.fail(str(error), error.details)
                line = cut_line(str(error))
            attempt += 1
            self.num_requeues += 1
            log.warning("A trajectory of prompt %d is requeued: %s", self._request.prompt.index, line)
            self._policies[number] = self._make_policy(number=number, attempt=attempt)

    async def _run(self, run: Callable[[Policy], Awaitable[Outcome]], policy: Policy) -> Outcome:
        try:
            async with asyncio.timeout(self._timeout) as deadline:
                return await run(policy)
        except LimitReachedError:
            return Outcome(status="truncated")
        except TrajectoryLostError:
            raise
        except (asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            # Of the environment's own, which would end the loop, or reach the trainer without a text.
            return self.fail(f"it raised {describe_error(error)}")
        except Exception as error:
            if isinstance(error, RunError) and not isinstance(error, RequestRefusedError):
                raise  # such as the sampler's: no trajectory can go on
            if isinstance(error, TimeoutError) and deadline.expired():
                return Outcome(status="timeout", error=f"It took more than {self._timeout:g} s.")
            return self.fail(error)

    def fail(self, error: Exception | str, details: str = "") -> Outcome:
        """Return the outcome of a trajectory that has failed, see :func:`failed_outcome`."""
        if self.first_failure is None and isinstance(error, Exception):
            self.first_failure = describe_error(error), "".join(traceback.format_exception(error))
        return failed_outcome(self._request.prompt, error, details)

    def finish(self, outcomes: Sequence[Outcome], seconds: float) -> list[Trajectory]:
        """Return the trajectories.

        Args:
            outcomes: of each.
            seconds: that the group took.
        """
        errors = (outcome.error or "" for outcome in outcomes if outcome.status == "failed")
        if self.first_failure is None and (error := next(errors, None)) is not None:
            self.first_failure = error.strip().rpartition("\n")[2], error
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
