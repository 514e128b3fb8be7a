"""One attempt at a prompt: its samples, turns and branches.

Workers of environments import this file in other interpreters: Python 3.10 and the standard library, nothing else.
Letters in shapes: ``P`` tokens of a prompt, ``C`` of a sample, ``L`` of a branch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

from rlightning.types.supports import Supports

TEMPERATURES = (0.01, 2.0)
"""The lowest above 0 and the highest that vLLM samples with as they are."""

Number = TypeVar("Number", int, float)
Plain = dict[str, Any]
"""A record as numbers, texts, lists, tuples and mappings, which every checkpoint format can save."""

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
"""Why a branch begins: the trajectory does; or its history was continued more than once (``n``, parallel requests, a
retry), or was rewritten: a message of the user's or a tool's is another one, or a turn of the policy's; messages were
left out, or replaced by fewer; only the policy's earlier reasoning was left out; it is the same text in other tokens;
it differs otherwise; the system message or the tools were changed; or it begins differently (a sub-agent)."""


class Prompt(NamedTuple):
    """One row of a prompt set, in the form that is sent to the engine.

    A tuple like :class:`Turn`: Lightning walks through batches and predictions, and fails at frozen dataclasses.

    Attributes:
        index: the row's place in its set; stable over epochs and resumes.
        text: what the model reads, after the chat template.
        token_ids: [P], the tokens of ``text``; nothing is tokenised again later.
        columns: the row as it was read; reward functions get these by name.
        completion_ids: [C], the tokens of the row's own completion, to learn from; None where it has none.
        temperature: that its completions are sampled with, in place of the run's; None: the run's.
        max_new_tokens: that its completions are cut at, below the run's limit; None: the run's.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index()
    text: str
    token_ids: list[int]
    columns: dict[str, Any]
    completion_ids: list[int] | None = None
    temperature: float | None = None
    max_new_tokens: int | None = None


class Buffers:
    """Base of records with arrays, which Lightning leaves whole: it takes tuples, lists and dataclasses apart."""

    __slots__: tuple[str, ...] = ()

    def attributes(self) -> dict[str, object]:
        """Return all attributes by name."""
        names = [name for kind in type(self).__mro__ for name in vars(kind).get("__slots__", ())]
        return {name: getattr(self, name) for name in names}

    def __eq__(self, other: object) -> bool:
        """Return whether all attributes are equal."""
        return isinstance(other, Buffers) and type(other) is type(self) and self.attributes() == other.attributes()

    __hash__ = None  # type: ignore[assignment]  # as of any record that can change

    def __repr__(self) -> str:
        """Return a text with all attributes."""
        values = ", ".join(f"{name}={value!r}" for name, value in self.attributes().items())
        return f"{type(self).__name__}({values})"


class Sample(Buffers):
    """The engine's result of one request.

    Args:
        token_ids: [C] int64, as sampled (a final end-of-sequence token included).
        logprobs: [C] float32, of each token under the distribution that it was sampled from.
        weight_versions: [C] int32, the version of the weights that sampled each token.
        text: the tokens decoded, without special tokens and the end of sequence; a stop string or stop token that the
            run has named is part of it.
        finish_reason: "stop" (end of sequence or a stop string) or "length" (cut at the token limit).
        supports: C of them, the tokens that each token was drawn from; None: the whole vocabulary.
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
        sample: that the policy's message came from; None for an observation (tool result, environment, user).
    """

    message: dict[str, Any]
    sample: Sample | None = None


def samples_of(turns: Iterable[Turn]) -> list[Sample]:
    """Return the policy's samples, in the order of turns."""
    return [turn.sample for turn in turns if turn.sample is not None]


class Branch(Buffers):
    """One token sequence of a trajectory. A new one begins where the history was rewritten.

    A token that was sampled into an earlier branch and is history here is not ``is_sampled`` here: every sampled token
    is trained in exactly one branch.

    Args:
        reason: why it began.

    Attributes:
        token_ids: [L] int64.
        is_sampled: [L] int8, 1 for tokens that the policy sampled into this branch.
        logprobs: [L] float32, the sampler's; 0 where not sampled.
        weight_versions: [L] int32, the sampler's; -1 where not sampled.
        turns: [L] int32, the place in ``Trajectory.turns`` of the turn that each token is of; -1 for the prompt.
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
        """Return the values of its tokens, [L] each, by the names of the attributes."""
        return {name: value for name, value in self.attributes().items() if isinstance(value, array)}

    def append(self, token_ids: Sequence[int], turn: int = -1) -> None:
        """Add tokens that were not sampled in this branch: prompt, observation, template, or history.

        Args:
            token_ids: of them.
            turn: that they are of; -1: the prompt.
        """
        count = len(token_ids)
        self.token_ids.extend(token_ids)
        self.is_sampled.extend(array("b", [0]) * count)
        self.logprobs.extend(array("f", [0.0]) * count)
        self.weight_versions.extend(array("i", [-1]) * count)
        self.turns.extend(array("i", [turn]) * count)

    def first(self, count: int) -> Branch:
        """Return a copy with only the first tokens."""
        copy = Branch(self.reason)
        for name, values in self.arrays().items():
            setattr(copy, name, values[:count])
        return copy

    def append_sample(self, sample: Sample, turn: int) -> None:
        """Add the tokens that were sampled for a turn, which are trained in this branch.

        Args:
            sample: of the turn.
            turn: its place in the trajectory.
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
        agent: its name. The rewards of an agent's traces are compared with each other over the prompt's trajectories.
        reward: the environment's, of the trace.
        turns: the trace's among the policy's turns, counted from 0; each turn is of one trace.
    """

    agent: str
    reward: float
    turns: list[int]


@dataclass(slots=True)
class Trajectory:
    """One attempt at a prompt.

    Attributes:
        prompt: what was attempted.
        branches: its token sequences; one, unless the history was written anew on the way.
        turns: its messages after the prompt, in their order.
        status: ``finished``; ``truncated`` by a limit on tokens or turns, and trained all the same; or one that counts
            as not sampled: ``timeout``, ``aborted`` (staleness, shutdown), ``failed`` (infrastructure).
        scores: by reward function, unweighted; None where a function gave none.
        reward: the environment's; None where it gives none.
        turn_rewards: the environment's, one for each turn of the policy; None where it gives none.
        metrics: the environment's numbers.
        timings: seconds by what was waited for: of the ``trajectory`` in all and, unless it is of a single turn, of the
            ``engine`` and of the ``environment``.
        error: why it did not finish.
        traces: the environment's, of several agents; None where the trajectory's reward is that of all turns.
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
            ValueError: there is none, or several.
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
        reward: of the trajectory; None: the sum of ``turn_rewards`` or the mean of ``traces``, and without these reward
            functions alone decide.
        turn_rewards: one for each turn of the policy, parts of the trajectory's reward; None where there are none.
        status: see :class:`Trajectory`.
        metrics: numbers to log.
        error: why it did not finish.
        traces: what each of several agents did, with its own reward; None: all turns have the trajectory's.
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
        prompts: one a group.
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
    """Return the trajectory of a :func:`to_plain` result.

    Args:
        plain: what it returned.
        prompt: the trajectory's.
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
    prompt = prompt._replace(temperature=plain.pop("temperature", prompt.temperature))  # what it was sampled at
    own = {"prompt": prompt, "branches": tuple(branches), "turns": turns, "traces": read_traces(traces)}
    return Trajectory(**{**plain, **own})


def read_traces(plain: Iterable[Iterable[object]] | None) -> list[AgentTrace] | None:
    """Return agent traces from the lists or tuples that they were saved as."""
    return None if plain is None else [AgentTrace._make(trace) for trace in plain]


def _plain_buffers(record: Buffers) -> Plain:
    plain: Plain = {}
    for name, value in record.attributes().items():
        value = value.to_plain() if isinstance(value, Supports) else value
        plain[name] = value.tolist() if isinstance(value, array) else value
    return plain


def _sample(plain: Plain) -> Sample:
    """Return the sample of what :func:`_plain_buffers` has made of it."""
    supports = plain.get("supports")
    return Sample(**{**plain, "supports": None if supports is None else Supports(*supports)})


def _buffer(typecode: str, values: Iterable[Number]) -> array[Number]:
    """Return values as an array; an array of this type is returned as it is."""
    if isinstance(values, array) and values.typecode == typecode:
        return values
    return array(typecode, values)
