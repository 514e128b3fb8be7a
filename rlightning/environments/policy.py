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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

from rlightning import intervals
from rlightning.environments.chat_format import ChatFormat
from rlightning.environments.environment import LimitReachedError, Policy, Reply, TrajectoryLostError
from rlightning.environments.messages import AssistantMessage, Message
from rlightning.environments.outcomes import check_outcome
from rlightning.environments.recorder import RecordedTurn, Recorder
from rlightning.environments.timing import TimedSampler
from rlightning.errors import RequestRefusedError, RunError, StreamLostError
from rlightning.foreign_text import cut, cut_line, describe_error
from rlightning.rollout import OnTokens, Sampling, TokenSampler, follows_schemas, stream_tokens
from rlightning.seeds import mix_seed
from rlightning.types.trajectory import BranchReason, Outcome, Prompt, Sample, Trajectory, read_traces

log = logging.getLogger(__name__)

CONSTRAINED = "constrained_turns"
"""Metric of a trajectory, only of one that has such turns."""
PART_BITS = 32
"""Of the number of a turn in its part of a trajectory."""


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
        chat_format: the policy's.
        request: the group's.
        number: of the trajectory in its group.
        max_length: tokens of the longest sequence.
        attempt: at the trajectory, from 0; each draws other random numbers.

    Attributes:
        temperature: that all of its turns are sampled at in place of the prompt's or the run's; None: that one.
        has_reached_limit: whether the last request was longer than a sequence may be.
        failure: the first error of the sampler's, after which nothing of the trajectory is worth anything.
        progress: what the environment has made of the trajectory so far, for one that runs out of time.
        num_requested: turns that have been asked for.
        num_constrained: turns whose distribution a request has changed otherwise than by the temperature.
    """

    def __init__(
        self,
        sampler: TokenSampler,
        chat_format: ChatFormat,
        request: GroupRequest,
        number: int,
        max_length: int,
        attempt: int = 0,
    ) -> None:
        self.chat_format, self.max_length, self.recorder = chat_format, max_length, Recorder()
        self.temperature: float | None = None
        self.has_reached_limit = False
        self.num_constrained = 0
        self.failure: Exception | None = None
        self.progress: Outcome | None = None
        self._sampler, self._request, self._number, self._attempt = sampler, request, number, attempt
        self._session = secrets.token_hex(8)
        self._num_parts = 0
        self._tools: list[Message] | None = None
        self.num_requested = 0

    @property
    def sampling(self) -> Sampling:
        """How its turns are sampled."""
        return self._request.sampling

    @property
    def stream(self) -> int:
        """Number of the trajectory's random stream."""
        return mix_seed(self.sampling.seed or 0, self._request.prompt.index, self._number)

    @property
    def follows_schemas(self) -> bool:
        """Whether turns may be sampled by a schema."""
        return follows_schemas(self._sampler)

    def split(self) -> "RecordedPolicy":
        """Return a policy for a part of the trajectory, such as one of several agents.

        It records on its own; ``recorder.extend`` makes that part of this trajectory.
        """
        part = RecordedPolicy(self._sampler, self.chat_format, self._request, self._number, self.max_length)
        part.temperature = self.temperature
        part.num_requested = self._num_parts << PART_BITS  # draws from streams of its own
        self._num_parts += 1
        return part

    async def chat(self, *observations: Message, tools: Sequence[Message] | None = None) -> Reply:
        """See :meth:`Policy.chat`."""
        recorder = self.recorder
        if recorder.branches:
            if tools is not None and list(tools) != (self._tools or []):
                raise ValueError("Tools are given with the first turn, and stay the same in later ones.")
            last = next(turn.sample for turn in reversed(recorder.turns) if turn.sample is not None)
            ended = last.finish_reason == "stop"
            added = self.chat_format.render_observations(observations, sampled=last.token_ids, ended=ended)
            history = [*recorder.branches[-1].token_ids, *added]
        elif observations or tools:
            if tools:
                self.chat_format.check_tools()
            self._tools = list(tools) if tools else None
            messages = observations or self.chat_format.prompt_messages(self._request.prompt)
            history = self.chat_format.render(messages, self._tools)
        else:
            history = self._request.prompt.token_ids
        number = len(recorder.turns) + len(observations)

        def read(sample: Sample) -> AssistantMessage:
            if not self._tools:
                return AssistantMessage(sample.text)
            return self.chat_format.parse(sample.token_ids, self._tools, prompt_ids=history, turn=number)

        (turn,) = await self.sample_turns(history, self.sampling, observations=observations, read=read)
        return Reply(turn.sample, turn.message) if self._tools else Reply(turn.sample)

    async def sample(self, token_ids: Sequence[int]) -> Sample:
        """See :meth:`Policy.sample`."""
        (turn,) = await self.sample_turns(token_ids, self.sampling)
        return turn.sample

    async def report(self, outcome: Outcome) -> None:
        """See :meth:`Policy.report`."""
        self.progress = outcome

    async def sample_turns(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        num_samples: int = 1,
        reason: BranchReason | None = None,
        observations: Sequence[Mapping[str, Any]] = (),
        read: Callable[[Sample], AssistantMessage] | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[RecordedTurn]:
        """Sample turns that all follow one history, and record them. May be called while other calls are under way.

        Args:
            token_ids: [L], the history. What goes on from the end of a branch extends it.
            sampling: how. The run's seed stands for a stream of each turn's own.
            num_samples: turns; each but the first begins a branch.
            reason: why a branch begins if the history extends none; None: as far as the tokens tell.
            observations: messages that the history ends with, for the trajectory's turns.
            read: returns what a sample says, in their order; None: its text.
            on_tokens: called with tokens as they are sampled, if the sampler has partial output.

        Raises:
            LimitReachedError: the history is as long as it may be.
        """
        room = self.max_length - len(token_ids)
        if room < 1:
            self.has_reached_limit = True
            raise LimitReachedError(f"{len(token_ids)} tokens leave no room in {self.max_length}.")
        seed = sampling.seed
        if seed is not None and seed == self.sampling.seed:
            # The first turn draws what it would if the group were sampled by one request.
            seed, is_first = seed + self._number, self.num_requested == 0 and num_samples == 1
            seed = mix_seed(seed, "attempt", self._attempt) if self._attempt else seed
            seed = seed if is_first else mix_seed(seed, "turn", self.num_requested)
        sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room), seed=seed)
        self.num_requested += num_samples
        reservation = self.recorder.reserve(token_ids, reason)
        try:
            try:
                samples = await self._sample(token_ids, sampling, num_samples, on_tokens)
            except Exception as error:
                # That a schema is refused is the client's own error, and the trajectory goes on.
                is_refusal = isinstance(error, RequestRefusedError) and not isinstance(error, StreamLostError)
                if sampling.json_schema is None or not is_refusal:
                    self.failure = self.failure or error
                raise
            messages = None if read is None else [read(sample) for sample in samples]
        except BaseException:
            self.recorder.release(reservation)
            raise
        self.has_reached_limit = False
        self.num_constrained += num_samples if sampling.json_schema is not None else 0
        return self.recorder.record(reservation, samples, observations, messages)

    async def _sample(
        self, token_ids: Sequence[int], sampling: Sampling, num_samples: int, on_tokens: OnTokens | None
    ) -> list[Sample]:
        arguments: dict[str, Any] = {"num_samples": num_samples, "session": self._session}
        if on_tokens is None:
            return await self._sampler.sample(token_ids, sampling, **arguments)
        return await stream_tokens(self._sampler, on_tokens, token_ids, sampling, **arguments)

    def record(self, token_ids: Sequence[int], sample: Sample) -> None:
        """Add a turn that was sampled after ``token_ids``."""
        self.recorder.record(self.recorder.reserve(token_ids), [sample])

    def finish(self, outcome: Outcome, seconds: float) -> Trajectory:
        """Return the trajectory; one that a limit on tokens has cut is truncated, and its reward may be of its parts.

        Args:
            outcome: what the environment has returned.
            seconds: that it took.
        """
        prompt, turns = self._request.prompt, self.recorder.turns
        samples = [turn.sample for turn in turns if turn.sample is not None]
        is_cut = self.has_reached_limit or bool(samples and samples[-1].is_truncated)
        is_usual = self.temperature in (None, self.sampling.temperature)
        reward, turn_rewards, traces = outcome.reward, outcome.turn_rewards, read_traces(outcome.traces)
        if reward is None and turn_rewards:
            reward = math.fsum(turn_rewards)
        elif reward is None and traces:
            reward = math.fsum(trace.reward for trace in traces) / len(traces)
        return Trajectory(
            prompt if is_usual else prompt._replace(temperature=self.temperature),
            tuple(self.recorder.branches),
            tuple(turns),
            "truncated" if outcome.status == "finished" and is_cut else outcome.status,
            reward=reward,
            turn_rewards=turn_rewards,
            metrics=outcome.metrics | ({CONSTRAINED: float(self.num_constrained)} if self.num_constrained else {}),
            timings={"trajectory": seconds},
            error=outcome.error,
            traces=traces,
        )


class RecordedGroup:
    """A :class:`~rlightning.environments.environment.PolicyGroup` that records the trajectories of a prompt.

    Args:
        sampler: as of :class:`RecordedPolicy`.
        chat_format: as of it.
        request: as of it.
        max_length: as of it.
        timeout: seconds that a trajectory may take; None: any time.
        max_requeues: how often a trajectory that was lost with its worker is made again.

    Attributes:
        num_requeues: of all trajectories.
        first_failure: of them in a line, and its traceback; None without any.
        started_at: when each began that runs, by its number, of the monotonic clock.
    """

    def __init__(
        self,
        sampler: TokenSampler,
        chat_format: ChatFormat,
        request: GroupRequest,
        max_length: int,
        timeout: float | None,
        max_requeues: int = 0,
    ) -> None:
        self._sampler, self._chat_format, self._request = sampler, chat_format, request
        self._max_length, self._timeout, self._max_requeues = max_length, timeout, max_requeues
        self._samplers = [TimedSampler(sampler) for _ in range(request.num_trajectories)]
        self._policies = [self._make_policy(number) for number in range(request.num_trajectories)]
        self.num_requeues = 0
        self.first_failure: tuple[str, str] | None = None
        self.started_at: dict[int, float] = {}

    def _make_policy(self, number: int, attempt: int = 0) -> RecordedPolicy:
        sampler = self._samplers[number]
        return RecordedPolicy(sampler, self._chat_format, self._request, number, self._max_length, attempt)

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
                self.started_at[number] = monotonic()
                try:
                    with self._samplers[number].timing():
                        return await self._run_again(run, number)
                finally:
                    del self.started_at[number]

        tasks = [asyncio.ensure_future(run_in_place(number)) for number in range(len(self._policies))]
        try:
            return list(await asyncio.gather(*tasks))
        finally:  # if one of them has ended the run, the others ask for nothing more
            running = [task for task in tasks if not task.done()]
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running, timeout=intervals.CANCEL_GRACE)

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
            self._policies[number] = self._make_policy(number, attempt)

    async def _run(self, run: Callable[[Policy], Awaitable[Outcome]], policy: RecordedPolicy) -> Outcome:
        try:
            async with asyncio.timeout(self._timeout) as deadline:
                return await _run_unless_failed(run, policy)
        except LimitReachedError as error:
            return Outcome(status="truncated", error=cut(str(error)))
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
                made = policy.progress or Outcome()
                return replace(made, status="timeout", error=f"It took more than {self._timeout:g} s.")
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
        trajectories = []
        for policy, sampler, outcome in zip(self._policies, self._samplers, outcomes, strict=True):
            trajectory = policy.finish(outcome, seconds)
            trajectory.timings |= sampler.timings
            trajectories.append(trajectory)
        return trajectories


async def _run_unless_failed(run: Callable[[Policy], Awaitable[Outcome]], policy: RecordedPolicy) -> Outcome:
    """Make a trajectory; the first failure of its sampler's is raised, whatever the environment has made of it."""
    try:
        outcome = check_outcome(await run(policy))
    except Exception as error:
        if policy.failure is None or policy.failure is error:
            raise
        raise policy.failure from None  # error may have been raised from it
    if policy.failure is not None:
        raise policy.failure
    return outcome


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
