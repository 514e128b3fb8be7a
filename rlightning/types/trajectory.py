"""One attempt at a prompt: its samples, turns and branches.

Workers of environments import this file in other interpreters: it needs only Python 3.10 and the standard library.
Letters in shapes: ``P`` tokens of a prompt, ``C`` of a sample, ``L`` of a branch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

from rlightning.types.supports import Buffers, Supports

TEMPERATURES = (0.01, 2.0)
"""The lowest temperature above 0 and the highest one that vLLM applies without changing them."""

Number = TypeVar("Number", int, float)
Plain = dict[str, Any]
"""A record as numbers, texts, lists, tuples and mappings, which every checkpoint format supports."""

FinishReason = Literal["stop", "length"]
Status = Literal["finished", "truncated", "timeout", "aborted", "failed"]
BranchReason = Literal[
    "start",
    "sampled_again",
    "message_edited",
    "turn_edited",
    "messages_dropped",
    "compacted",
    "reasoning_dropped",
    "retokenized",
    "history_edited",
    "system_changed",
    "tools_changed",
    "started_over",
]
"""Why a branch begins: with the trajectory; because its history was continued more than once (``n``, parallel requests,
a retry); or because its history was rewritten: a message of the user or a tool was changed, or a turn of the policy;
messages were left out, or replaced by fewer; only the policy's earlier reasoning was left out; the same text has other
tokens; for another reason; the system message or the tools were changed; or it has another beginning (a sub-agent)."""


class Prompt(NamedTuple):
    """One row of a prompt set, in the form that is sent to the engine.

    A tuple like :class:`Turn`, because Lightning traverses batches and predictions, and fails at frozen dataclasses.

    Attributes:
        index: index of the row in its set; stable over epochs and resumes.
        text: the model's input, after the chat template.
        token_ids: [P], the tokens of ``text``, which are not tokenised again.
        columns: the row as it was read; reward functions get these by name.
        completion_ids: [C], the tokens of the row's own completion, for SFT; None without one.
        temperature: temperature of the row's completions; None for the run's.
        max_new_tokens: maximum tokens of the row's completions, at most the run's limit; None for the run's.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index()
    text: str
    token_ids: list[int]
    columns: dict[str, Any]
    completion_ids: list[int] | None = None
    temperature: float | None = None
    max_new_tokens: int | None = None


class Sample(Buffers):
    """The engine's result of one request.

    Args:
        token_ids: [C] int64, as sampled (a final end-of-sequence token included).
        logprobs: [C] float32, of each token under the distribution from which it was sampled.
        weight_versions: [C] int32, the version of the weights that sampled each token.
        text: the decoded tokens, without special tokens and the end of sequence, but including a configured stop string
            or stop token.
        finish_reason: "stop" (end of sequence or a stop string) or "length" (cut at the token limit).
        supports: for each token the tokens from which it was drawn; None for the whole vocabulary.
    """

    __slots__ = ("finish_reason", "logprobs", "supports", "text", "token_ids", "weight_versions")

    def __init__(
        self,
        token_ids: Iterable[int],
        logprobs: Iterable[float],
        weight_versions: Iterable[int],
        text: str,
        finish_reason: FinishReason,
        supports: Supports | None = None,
    ) -> None:
        self.token_ids: array[int] = _buffer("q", token_ids)
        self.logprobs: array[float] = _buffer("f", logprobs)
        self.weight_versions: array[int] = _buffer("i", weight_versions)
        self.text = text
        self.finish_reason: FinishReason = finish_reason
        self.supports = supports

    @property
    def is_truncated(self) -> bool:
        """Whether the token limit ended the sample."""
        return self.finish_reason == "length"


class Turn(NamedTuple):
    """One message of a trajectory.

    Attributes:
        message: as in chat APIs, with ``role`` ("assistant", "tool", "user", ...) and ``content``.
        sample: the sample from which the policy's message was parsed; None for an observation (tool result,
            environment, user).
    """

    message: dict[str, Any]
    sample: Sample | None = None


def samples_of(turns: Iterable[Turn]) -> list[Sample]:
    """Return the policy's samples, in the order of turns."""
    return [turn.sample for turn in turns if turn.sample is not None]


class Branch(Buffers):
    """One token sequence of a trajectory. A new branch begins where the history was rewritten.

    Tokens that were sampled in an earlier branch are history in a later one, where ``is_sampled`` is 0 for them: every
    sampled token is trained in exactly one branch.

    Args:
        reason: why the branch began.

    Attributes:
        token_ids: [L] int64.
        is_sampled: [L] int8, 1 for tokens that the policy sampled into this branch.
        logprobs: [L] float32, from the sampler; 0 where not sampled.
        weight_versions: [L] int32, version of the weights that sampled each token; -1 where not sampled.
        turns: [L] int32, the index in ``Trajectory.turns`` of the turn to which each token belongs; -1 for the prompt.
    """

    __slots__ = ("is_sampled", "logprobs", "reason", "token_ids", "turns", "weight_versions")

    def __init__(self, reason: BranchReason = "start") -> None:
        self.reason: BranchReason = reason
        self.token_ids: array[int] = array("q")
        self.is_sampled: array[int] = array("b")
        self.logprobs: array[float] = array("f")
        self.weight_versions: array[int] = array("i")
        self.turns: array[int] = array("i")

    def arrays(self) -> dict[str, array[int] | array[float]]:
        """Return the branch's arrays with one value for each token, [L] each, by attribute name."""
        return {name: value for name, value in self.attributes().items() if isinstance(value, array)}

    @property
    def beginning(self) -> array[int]:
        """The tokens before the first one that was sampled in this branch, all if none was: int64."""
        return self.token_ids[: self.is_sampled.index(1)] if 1 in self.is_sampled else self.token_ids

    def append(self, token_ids: Sequence[int], turn: int = -1) -> None:
        """Add tokens that were not sampled in this branch: prompt, observation, template, or history.

        Args:
            token_ids: the tokens.
            turn: index of the turn to which they belong; -1 for the prompt.
        """
        count = len(token_ids)
        self.token_ids.extend(token_ids)
        self.is_sampled.extend(array("b", [0]) * count)
        self.logprobs.extend(array("f", [0.0]) * count)
        self.weight_versions.extend(array("i", [-1]) * count)
        self.turns.extend(array("i", [turn]) * count)

    def first(self, count: int) -> Branch:
        """Return a copy with only the first ``count`` tokens."""
        copy = Branch(self.reason)
        for name, values in self.arrays().items():
            setattr(copy, name, values[:count])
        return copy

    def append_sample(self, sample: Sample, turn: int) -> None:
        """Add the tokens that were sampled for a turn, which are trained in this branch.

        Args:
            sample: sample of the turn.
            turn: index of the turn in the trajectory.
        """
        count = len(sample.token_ids)
        self.token_ids.extend(sample.token_ids)
        self.is_sampled.extend(array("b", [1]) * count)
        self.logprobs.extend(sample.logprobs)
        self.weight_versions.extend(sample.weight_versions)
        self.turns.extend(array("i", [turn]) * count)


class AgentTrace(NamedTuple):
    """The turns and the reward of one agent in a trajectory of several agents.

    Attributes:
        agent: name of the agent. Rewards of the same agent's traces are compared over the prompt's trajectories.
        reward: reward of the trace, from the environment.
        turns: indices of the trace's turns among the policy's turns, counted from 0; each turn belongs to one trace.
    """

    agent: str
    reward: float
    turns: list[int]


@dataclass(slots=True)
class Trajectory:
    """One attempt at a prompt.

    Attributes:
        prompt: the prompt that was attempted.
        branches: token sequences; more than one if the history was rewritten.
        turns: messages after the prompt, in order.
        status: ``finished``; ``truncated`` by a limit on tokens or turns, but trained on; or one that counts as not
            sampled: ``timeout``, ``aborted`` (staleness, shutdown), ``failed`` (infrastructure).
        scores: unweighted result of each reward function; None if a function does not apply or failed. Empty before the
            trajectory is rewarded.
        reward: reward from the environment; None if it gives none.
        turn_rewards: rewards from the environment, one for each turn of the policy; None if it gives none.
        metrics: numbers from the environment.
        timings: seconds of the ``trajectory`` in total, and, unless it has a single turn, of waiting for the ``engine``
            and for the ``environment``.
        error: why the trajectory did not finish; None if it did.
        traces: traces of several agents, from the environment; None if all turns have the trajectory's reward.
        reward_results: for reward functions that were called before the trajectory's step, by name: the score, and the
            error of a call that failed. Moved to ``scores`` when the trajectory is rewarded, and not saved.
    """

    prompt: Prompt
    branches: tuple[Branch, ...]
    turns: tuple[Turn, ...]
    status: Status = "finished"
    scores: dict[str, float | None] = field(default_factory=dict)
    reward: float | None = None
    turn_rewards: list[float] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    traces: list[AgentTrace] | None = None
    reward_results: dict[str, tuple[float | None, str | None]] = field(default_factory=dict)

    @classmethod
    def single_turn(cls, prompt: Prompt, sample: Sample) -> Trajectory:
        """Return the trajectory of a prompt with a single completion, ``sample``."""
        branch = Branch()
        branch.append(prompt.token_ids)
        branch.append_sample(sample, 0)
        turn = Turn({"role": "assistant", "content": sample.text}, sample)
        return cls(prompt, (branch,), (turn,), "truncated" if sample.is_truncated else "finished")

    @property
    def samples(self) -> list[Sample]:
        """The policy's samples, in the order of turns."""
        return samples_of(self.turns)

    @property
    def completion(self) -> Sample:
        """The sample of a single-turn trajectory.

        Raises:
            ValueError: the trajectory has no sample, or several.
        """
        samples = self.samples
        if len(samples) != 1:
            raise ValueError(f"Prompt {self.prompt.index}: {len(samples)} samples, and a completion is one. Use turns.")
        return samples[0]

    @property
    def final_text(self) -> str:
        """The text of the policy's last message; for a single-turn trajectory the completion's text."""
        samples = self.samples
        return samples[-1].text if samples else ""

    @property
    def finish_reason(self) -> str:
        """The finish reason of the policy's last message; the trajectory's status if there is none."""
        samples = self.samples
        return samples[-1].finish_reason if samples else self.status

    @property
    def num_sampled(self) -> int:
        """The number of tokens that the policy sampled."""
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def is_truncated(self) -> bool:
        """Whether a limit on tokens or turns ended the trajectory."""
        return self.status == "truncated"


@dataclass(slots=True)
class Outcome:
    """The result that an environment returns at the end of a trajectory.

    Attributes:
        reward: reward of the trajectory; None for the sum of ``turn_rewards`` or the mean of ``traces``; without these,
            only reward functions score the trajectory.
        turn_rewards: a reward for each turn of the policy, as parts of the trajectory's reward; None without any.
        status: see :class:`Trajectory`.
        metrics: numbers to log.
        error: why the trajectory did not finish; None if it did.
        traces: turns and reward of each of several agents; None if all turns have the trajectory's reward.
    """

    reward: float | None = None
    turn_rewards: list[float] | None = None
    status: Status = "finished"
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    traces: list[AgentTrace] | None = None


def single_turns(prompts: Sequence[Prompt], samples: Sequence[Sequence[Sample]]) -> list[list[Trajectory]]:
    """Return each prompt's single-turn trajectories, one for each of its samples.

    Args:
        prompts: one for each group.
        samples: for each prompt its samples, in any number.
    """
    pairs = zip(prompts, samples, strict=True)
    return [[Trajectory.single_turn(prompt, sample) for sample in group] for prompt, group in pairs]


def to_plain(trajectory: Trajectory) -> Plain:
    """Return a trajectory, without its prompt, in plain types that every checkpoint format can save."""
    return {
        "temperature": trajectory.prompt.temperature,
        "branches": [_plain_buffers(branch) for branch in trajectory.branches],
        "turns": [(turn.message, turn.sample and _plain_buffers(turn.sample)) for turn in trajectory.turns],
        "status": trajectory.status,
        "scores": trajectory.scores,
        "reward": trajectory.reward,
        "turn_rewards": trajectory.turn_rewards,
        "metrics": trajectory.metrics,
        "timings": trajectory.timings,
        "error": trajectory.error,
        "traces": trajectory.traces and [tuple(trace) for trace in trajectory.traces],
    }


def from_plain(plain: Plain, prompt: Prompt) -> Trajectory:
    """Return the trajectory from the plain types of :func:`to_plain`.

    Args:
        plain: a result of :func:`to_plain`.
        prompt: the trajectory's prompt.
    """
    branches = []
    for saved in plain["branches"]:
        branch = Branch(saved["reason"])
        for name, values in branch.arrays().items():
            values.extend(saved[name])
        branches.append(branch)
    turns = tuple(Turn(message, sample and _sample(sample)) for message, sample in plain["turns"])
    plain = dict(plain)
    traces = plain.pop("traces", None)
    prompt = prompt._replace(temperature=plain.pop("temperature", prompt.temperature))  # the temperature sampled at
    own = {"prompt": prompt, "branches": tuple(branches), "turns": turns, "traces": read_traces(traces)}
    return Trajectory(**{**plain, **own})


def read_traces(plain: Iterable[Iterable[object]] | None) -> list[AgentTrace] | None:
    """Return agent traces from their saved form, a list or tuple of values each; None for None."""
    return None if plain is None else [AgentTrace._make(trace) for trace in plain]


def _plain_buffers(record: Buffers) -> Plain:
    plain: Plain = {}
    for name, value in record.attributes().items():
        value = value.to_plain() if isinstance(value, Supports) else value
        plain[name] = value.tolist() if isinstance(value, array) else value
    return plain


def _sample(plain: Plain) -> Sample:
    """Return a sample from the result of :func:`_plain_buffers`."""
    supports = plain.get("supports")
    return Sample(**{**plain, "supports": None if supports is None else Supports(*supports)})


def _buffer(typecode: str, values: Iterable[Number]) -> array[Number]:
    """Return values as an array of this type code; an array of the type is returned unchanged."""
    if isinstance(values, array) and values.typecode == typecode:
        return values
    return array(typecode, values)
