"""The policy of an environment: it calls a sampler, and records the sampled tokens exactly.

A trajectory's token sequence only grows: turns keep their sampled tokens, and observations are tokenized separately, in
the chat template's format. A caller that rewrites the history begins a new branch, in which earlier tokens are not
trained on again.
"""

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlightning.environments.chat_format import ChatFormat
from rlightning.environments.clock import Clock
from rlightning.environments.environment import AskLimitError, LimitReachedError, Policy, Reply
from rlightning.environments.messages import AssistantMessage, Message
from rlightning.environments.outcomes import outcome_from_plain, outcome_to_plain, total_reward
from rlightning.environments.recorder import Mark, RecordedTurn, Recorder
from rlightning.environments.snapshots import SavedTrajectory, copy_plain
from rlightning.errors import RequestRefusedError, StreamLostError
from rlightning.foreign_text import cut, cut_line
from rlightning.python_values import JsonObject
from rlightning.rollout import OnTokens, Sampling, TokenSampler, follows_schemas
from rlightning.seeds import mix_seed
from rlightning.types.trajectory import (
    BranchReason,
    Outcome,
    Prompt,
    Sample,
    Trajectory,
    Turn,
    from_plain,
    read_traces,
    to_plain,
)

log = logging.getLogger(__name__)

CONSTRAINED = "constrained_turns"
"""Metric: the number of a trajectory's constrained turns; only of trajectories with such turns."""
TRUNCATED = "truncated_turns"
"""Metric: the number of a trajectory's turns that top_p, top_k or min_p truncated; only of trajectories in which a
request changed these, so that turns may differ from the run's, and from each other. It may be 0.
"""
SETTINGS = (
    *("tools", "attempt", "temperature", "num_requested", "num_constrained", "num_truncated", "changes_truncation"),
    "has_reached_limit",
)
"""Attributes of :class:`RecordedPolicy` that a checkpoint saves."""
PART_BITS = 32
"""Bits for the turn's number in the number of its random stream; the higher bits number the parts of a trajectory."""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """The request for a group: a prompt, sampling settings with the group's seed, and the number of trajectories.

    ``saved`` are the trajectories of a checkpoint (:meth:`RecordedGroup.save`), which continue from there.
    """

    prompt: Prompt
    sampling: Sampling
    num_trajectories: int
    saved: Sequence[SavedTrajectory | None] | None = None


class RecordedPolicy:
    """A :class:`~rlightning.environments.environment.Policy` that records one trajectory.

    Args:
        number: index of the trajectory in its group.
        max_length: maximum tokens of a sequence.
        attempt: number of the attempt at the trajectory, from 0; each attempt samples with another seed.
        clock: the trajectory's time and deadlines; None for a new one.

    Attributes:
        tools: schemas that were given with the first turn; None without any.
        attempt: number of the attempt.
        sampling: the sampling parameters of the trajectory's turns.
        temperature: temperature of all of the trajectory's turns; None for the prompt's, or else the run's.
        has_reached_limit: whether the last request exceeded the maximum length of a sequence.
        failure: the sampler's first error, which makes the trajectory fail.
        progress: the last preliminary outcome that the environment reported, used after a timeout.
        has_snapshots: whether the environment reports states from which it can continue.
        on_turn: called with each sampled turn.
        num_requested: number of requested turns.
        num_constrained: number of turns that a request constrained, such as to a JSON schema, so that their
            distribution changed.
        num_truncated: number of turns whose distribution ``top_p``, ``top_k`` or ``min_p`` truncated.
        changes_truncation: whether a turn was sampled with another ``top_p``, ``top_k`` or ``min_p`` than the run's.
    """

    def __init__(
        self,
        sampler: TokenSampler,
        chat_format: ChatFormat,
        request: GroupRequest,
        number: int,
        max_length: int,
        attempt: int = 0,
        clock: Clock | None = None,
    ) -> None:
        self.chat_format, self.max_length, self.recorder = chat_format, max_length, Recorder(chat_format.decode)
        self.sampling = request.sampling
        self.temperature: float | None = None
        self.has_reached_limit = False
        self.num_constrained = self.num_truncated = 0
        self.has_snapshots = self.changes_truncation = False
        self.failure: Exception | None = None
        self.progress: Outcome | None = None
        self.on_turn: Callable[[], None] = lambda: None
        self.clock = clock or Clock()
        self._sampler, self._request, self._number, self.attempt = sampler, request, number, attempt
        self._session = secrets.token_hex(8)
        self._kept: tuple[Mark, JsonObject, object] | None = None
        self._resumable: SavedTrajectory | None = None
        self._num_parts = self._num_asked = 0
        self.tools: list[Message] | None = None
        self.num_requested = 0

    @property
    def stream(self) -> int:
        """A seed that only this trajectory has, from the sampling seed, the prompt's index, and the trajectory's number
        in its group.
        """
        return mix_seed(self.sampling.seed or 0, self._request.prompt.index, self._number)

    @property
    def follows_schemas(self) -> bool:
        """Whether the sampler can constrain a turn to a JSON schema."""
        return follows_schemas(self._sampler)

    @property
    def has_begun(self) -> bool:
        """Whether a turn has been recorded, or :meth:`split` was called."""
        return bool(self.recorder.turns or self._num_parts)

    @property
    def is_cut(self) -> bool:
        """Whether a limit on tokens ended the last turn."""
        return self.has_reached_limit or any(sample.is_truncated for sample in self.recorder.samples[-1:])

    def split(self) -> "RecordedPolicy":
        """Return a policy that records a part of the trajectory separately, such as one of several agents.

        :meth:`join` appends that part to this trajectory.
        """
        part = RecordedPolicy(
            self._sampler, self.chat_format, self._request, self._number, self.max_length, self.attempt, self.clock
        )
        part.temperature, part.on_turn = self.temperature, lambda: self.on_turn()
        part.num_requested = self._num_parts << PART_BITS  # samples from its own random streams
        self._num_parts += 1
        return part

    def join(self, part: "RecordedPolicy", turns: Sequence[Turn] | None = None) -> None:
        """Append a part of :meth:`split`, which must not sample afterwards, to the trajectory.

        ``turns`` replaces the part's turns, as in :meth:`Recorder.extend`. The trajectory gets the temperature of the
        part that is joined last.
        """
        self.recorder.extend(part.recorder, turns)
        self.temperature = part.temperature
        self.num_constrained += part.num_constrained
        self.num_truncated += part.num_truncated
        self.changes_truncation |= part.changes_truncation

    async def chat(self, *observations: Message, tools: Sequence[Message] | None = None) -> Reply:
        """Sample the policy's next turn in the chat (:meth:`Policy.chat`)."""
        recorder = self.recorder
        if recorder.branches:
            if tools is not None and list(tools) != (self.tools or []):
                raise ValueError("Tools are given with the first turn, and stay the same in later ones.")
            last = recorder.samples[-1]
            ended = last.finish_reason == "stop"
            added = self.chat_format.render_observations(observations, sampled=last.token_ids, ended=ended)
            history = [*recorder.branches[-1].token_ids, *added]
        elif observations or tools:
            if tools:
                self.chat_format.check_tools()
            self.tools = list(tools) if tools else None
            messages = observations or self.chat_format.prompt_messages(self._request.prompt)
            history = self.chat_format.render(messages, self.tools)
        else:
            history = self._request.prompt.token_ids
        number = len(recorder.turns) + len(observations)

        def read(sample: Sample) -> AssistantMessage:
            if not self.tools:
                return AssistantMessage(sample.text)
            return self.chat_format.parse(sample.token_ids, self.tools, prompt_ids=history, turn=number)

        (turn,) = await self.sample_turns(history, self.sampling, observations=observations, read=read)
        return Reply(turn.sample, turn.message) if self.tools else Reply(turn.sample)

    async def sample(self, token_ids: Sequence[int]) -> Sample:
        """Sample the policy's next turn from a token sequence (:meth:`Policy.sample`)."""
        (turn,) = await self.sample_turns(token_ids, self.sampling)
        return turn.sample

    async def ask(self, *messages: Message, temperature: float = 0.0, max_new_tokens: int | None = None) -> Reply:
        """Sample an answer to a separate conversation, without recording it (:meth:`Policy.ask`)."""
        history = self.chat_format.render(messages)
        room = min(max_new_tokens or self.sampling.max_new_tokens, self.max_length - len(history))
        if room < 1:
            raise AskLimitError(f"{len(history)} tokens leave no room in {self.max_length}.")
        seed = mix_seed(self.stream, "ask", self._num_asked)
        self._num_asked += 1
        sampling = Sampling(temperature=temperature, max_new_tokens=room, seed=seed)
        try:
            with self.clock.requesting():
                (sample,) = await self._sampler.sample(history, sampling, num_samples=1, session=None)
        except Exception as error:
            self.failure = self.failure or error
            raise
        return Reply(sample, self.chat_format.parse(sample.token_ids, None, prompt_ids=history))

    async def report(self, outcome: Outcome, state: object = None) -> None:
        """Store a preliminary outcome and state (:meth:`Policy.report`)."""
        self.progress = outcome
        if state is not None:
            self._kept = self.recorder.mark(), self._settings(), copy_plain(state, "the state")

    async def resume(self) -> object:
        """Continue a saved trajectory, and return its state (:meth:`Policy.resume`)."""
        self.has_snapshots = True
        saved, self._resumable = self._resumable, None
        if saved is None:
            return None
        self.load(saved)
        self._kept = self.recorder.mark(), self._settings(), saved["state"]
        return copy_plain(saved["state"], "the state")

    # Checkpoints

    def offer(self, saved: SavedTrajectory) -> None:
        """Store a trajectory from a checkpoint for :meth:`resume`; it is discarded if a turn is sampled first."""
        self._resumable = saved

    def load(self, saved: SavedTrajectory) -> None:
        """Restore the turns and settings of a saved trajectory."""
        made = from_plain(saved["trajectory"], self._request.prompt)
        self.recorder.load(made.branches, made.turns)
        settings = saved["settings"]
        for name in SETTINGS:
            setattr(self, name, settings.get(name, getattr(self, name)))  # older checkpoints lack some
        self.progress = settings["progress"] and outcome_from_plain(settings["progress"])

    def save(self, outcome: Outcome | None) -> SavedTrajectory | None:
        """Return the trajectory in plain types for a checkpoint, as if it had ended with ``outcome``. Thread-safe.

        Without an outcome, return it as of its last reported state, else the trajectory of :meth:`offer`, else None.
        """
        kept = self._kept if outcome is None else (self.recorder.mark(), self._settings(), None)
        if kept is None:
            return self._resumable
        mark, settings, state = kept
        branches, turns = self.recorder.until(mark)
        trajectory = to_plain(Trajectory(self._request.prompt, tuple(branches), tuple(turns)))
        ended = None if outcome is None else outcome_to_plain(outcome)
        return {"trajectory": trajectory, "settings": settings, "state": state, "outcome": ended}

    def _settings(self) -> JsonObject:
        progress = None if self.progress is None else outcome_to_plain(self.progress)
        return {**{name: getattr(self, name) for name in SETTINGS}, "progress": progress}

    async def sample_turns(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        num_samples: int = 1,
        reason: BranchReason | None = None,
        observations: Sequence[Message] = (),
        read: Callable[[Sample], AssistantMessage] | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[RecordedTurn]:
        """Sample turns that continue the same history, record and return them. Calls may run concurrently.

        Args:
            token_ids: [L], the history. It extends a branch if it begins with all of the branch's tokens.
            sampling: settings; each turn replaces the seed with its own.
            num_samples: number of turns; each but the first begins a branch.
            reason: why a branch begins if the history extends none; None to infer it from the tokens.
            observations: messages at the end of the history, to be recorded as turns.
            read: parses a sample to a message; called in the samples' order. None for its text.
            on_tokens: called with tokens as they are sampled, if the sampler supports it.

        Raises:
            LimitReachedError: the history has its maximum length.
        """
        room = self.max_length - len(token_ids)
        if room < 1:
            self.has_reached_limit = True
            raise LimitReachedError(f"{len(token_ids)} tokens leave no room in {self.max_length}.")
        seed = sampling.seed
        if seed is not None and seed == self.sampling.seed:
            # The first turn uses the same seed as if one request sampled the group.
            seed, is_first = seed + self._number, self.num_requested == 0 and num_samples == 1
            seed = mix_seed(seed, "attempt", self.attempt) if self.attempt else seed
            seed = seed if is_first else mix_seed(seed, "turn", self.num_requested)
        sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room), seed=seed)
        self.num_requested += num_samples
        self._resumable = None  # the environment has started from scratch
        reservation = self.recorder.reserve(token_ids, reason)
        given: dict[str, Any] = {"num_samples": num_samples, "session": self._session}
        if on_tokens is not None:  # a sampler that never streams need not take it
            given["on_tokens"] = on_tokens
        try:
            try:
                with self.clock.requesting():
                    samples = await self._sampler.sample(token_ids, sampling, **given)
            except Exception as error:
                # A rejected schema is the client's error: the trajectory continues.
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
        self.num_truncated += num_samples if sampling.is_truncated else 0
        self.changes_truncation |= sampling.truncation != self.sampling.truncation
        self.on_turn()
        return self.recorder.record(reservation, samples, observations, messages)

    def finish(self, outcome: Outcome, seconds: float) -> Trajectory:
        """Return the recorded trajectory with its outcome. Status "finished" becomes "truncated" if a limit on tokens
        cut the last turn.
        """
        prompt = self._request.prompt
        unusual = {CONSTRAINED: float(self.num_constrained)} if self.num_constrained else {}
        unusual |= {TRUNCATED: float(self.num_truncated)} if self.changes_truncation else {}
        is_usual = self.temperature in (None, self.sampling.temperature)
        return Trajectory(
            prompt if is_usual else prompt._replace(temperature=self.temperature),
            tuple(self.recorder.branches),
            tuple(self.recorder.turns),
            "truncated" if outcome.status == "finished" and self.is_cut else outcome.status,
            reward=total_reward(outcome),
            turn_rewards=outcome.turn_rewards,
            metrics=outcome.metrics | unusual,
            timings={"trajectory": seconds},
            error=outcome.error,
            traces=read_traces(outcome.traces),
        )


def as_recorded(policy: Policy) -> RecordedPolicy:
    """Return ``policy`` as the RecordedPolicy that it is in the trainer's process.

    Raises:
        TypeError: it is the policy of an environment in a worker process.
    """
    if not isinstance(policy, RecordedPolicy):
        raise TypeError(
            f"A {type(policy).__name__} is no policy of the trainer's process. Set runs_in_workers = False."
        )
    return policy


def failed_outcome(prompt: Prompt, error: Exception | str, details: str = "") -> Outcome:
    """Log an error of an environment, and return the outcome of the failed trajectory, which counts as not sampled.

    Args:
        error: the environment's exception, or a line about it.
        details: error text for the trajectory, such as a traceback; "" to use ``error``.
    """
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    log.warning("A trajectory of prompt %d failed and counts as not sampled: %s", prompt.index, cut_line(text))
    log.debug("Of prompt %d: %s", prompt.index, details, exc_info=error if isinstance(error, Exception) else None)
    return Outcome(status="failed", error=cut(details) or text)
