"""Messages of verifiers' server about an episode: parts of its traces, and its summary at the end."""

import math
from array import array
from collections.abc import Sequence

from pydantic import BaseModel

from rlightning.foreign_text import cut_line
from rlightning.python_values import JsonObject
from rlightning.types.trajectory import Turn

LISTS = ("nodes", "calls", "errors")
"""Parts of a trace to which a message appends; a message's ``set`` replaces other parts."""
OVERFLOW = ("context_length_exceeded", "maximum context length")
"""Phrases in errors of the endpoint and of renderers that mean that a history is too long."""


class Failure(BaseModel):
    """An error that the package verifiers reports in a trace or an episode."""

    type: str = ""
    message: str = ""
    status_code: int | None = None

    @property
    def is_overflow(self) -> bool:
        """Whether the error says that a history exceeded the maximum length."""
        return self.status_code in (400, 413) and any(words in self.message for words in OVERFLOW)

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"


class Node(BaseModel):
    """A message of a trace. ``token_ids`` are the tokens that it adds to the previous message's; ``mask`` marks those
    that the policy sampled.
    """

    message: JsonObject = {}
    sampled: bool = False
    token_ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []

    @property
    def sampled_ids(self) -> list[int]:
        """Tokens that the policy sampled."""
        return [token for token, mine in zip(self.token_ids, self.mask, strict=True) if mine]

    def matches_turn(self, turn: Turn) -> bool:
        """Return whether this message has exactly the tokens and log-probabilities of a recorded turn."""
        sample = turn.sample
        if sample is None or self.sampled_ids != list(sample.token_ids):
            return False
        return array("f", self.logprobs) == sample.logprobs


class Call(BaseModel):
    """A request of an agent to the policy: its finish reason or error, and the index ``node`` of the message that it
    sampled.
    """

    node: int | None = None
    finish_reason: str | None = None
    error: Failure | None = None


class Reward(BaseModel):
    """One reward of a trace, with its weight."""

    score: float
    weight: float = 1.0


class Agent(BaseModel):
    """The name of the agent that a trace belongs to, and whether it may be trained."""

    name: str
    trainable: bool = True


class Trace(BaseModel):
    """The messages, requests and rewards of one agent in an episode."""

    id: str
    agent: Agent
    nodes: list[Node] = []
    calls: list[Call] = []
    rewards: dict[str, Reward | None] = {}
    metrics: dict[str, float | None] = {}
    ok: bool = False
    is_timeout: bool = False
    errors: list[Failure] = []

    @property
    def is_cut(self) -> bool:
        """Whether the trace ended because its history exceeded the maximum length."""
        error = self.calls[-1].error if self.calls else None
        return error is not None and error.is_overflow

    def find_failure(self) -> str | None:
        """Return the first error of the trace, even if verifiers reports the trace as ok; None without any."""
        called = [call.error for call in self.calls if call.error is not None and not call.error.is_overflow]
        for error in (*self.errors, *called):
            return str(error)
        if not self.ok:
            return "verifiers says that it is not ok"
        if any(call.finish_reason is None for call in self.calls if call.error is None):
            return "a turn of it did not end"
        missing = [name for name, reward in self.rewards.items() if reward is None]
        if missing:
            return f"its reward '{missing[0]}' was not computed"
        return None

    def sum_rewards(self) -> float | None:
        """Return the weighted sum of the trace's rewards, which must be finite; None if it has none."""
        given = [reward.score * reward.weight for reward in self.rewards.values() if reward is not None]
        if not all(map(math.isfinite, given)):
            raise ValueError(f"rewards of '{self.agent.name}' are not finite: {given}")
        return sum(given) if given else None

    def match(self, turns: Sequence[Turn]) -> list[Turn]:
        """Return the trace's messages after the prompt as turns. Those of the policy get the samples of the recorded
        ``turns``.

        Raises a ValueError if the policy's messages do not match the recorded ``turns`` one to one.
        """
        left = list(turns)
        asked = [call.node for call in self.calls if call.node is not None and call.error is None]
        # Some messages are rewritten by the task after they were sampled.
        num_rewritten = sum(not self.nodes[number].sampled_ids for number in asked)
        matched: list[Turn] = []
        for number, node in enumerate(self.nodes):
            if not node.sampled:
                matched += [Turn(node.message)] if matched else []  # otherwise it belongs to the prompt
                continue
            for _ in range(asked.count(number) if node.sampled_ids else 0):
                found = next((turn for turn in left if node.matches_turn(turn)), None)
                if found is None:
                    raise ValueError(
                        f"a turn of '{self.agent.name}' has {len(node.sampled_ids)} tokens not sampled for it"
                    )
                left.remove(found)
                matched.append(Turn(node.message, found.sample))
        if len(left) != num_rewritten:
            raise ValueError(f"{len(left)} sampled turns of '{self.agent.name}' are not in verifiers' trace of it")
        return [*matched, *left]


class Episode(BaseModel):
    """One attempt at a task, as reported by the server."""

    ok: bool = False
    is_timeout: bool = False
    errors: list[Failure] = []
    traces: list[Trace] = []

    @property
    def has_timed_out(self) -> bool:
        """Whether one of verifiers' own deadlines has passed; verifiers does not report this as an error."""
        return self.is_timeout or any(trace.is_timeout for trace in self.traces)

    def find_failure(self) -> str | None:
        """Return the first error of the episode; None without any."""
        for error in self.errors:
            return str(error)
        for trace in self.traces:
            failure = trace.find_failure()
            if failure is not None:
                return f"agent '{trace.agent.name}': {failure}"
        return None if self.ok else "verifiers says that it is not ok"


class EpisodeAssembly:
    """Assembles the record of one episode from the updates that verifiers' environment server sends during it."""

    def __init__(self) -> None:
        self._traces: dict[str, JsonObject] = {}

    def apply(self, delta: JsonObject) -> bool:
        """Add an update to the trace that it names, or discard that trace if the update says so; return whether the
        trace is new.
        """
        name = delta["trace"]
        if delta.get("discard"):
            self._traces.pop(name, None)
            return False
        is_new = name not in self._traces
        trace = self._traces.setdefault(name, {"id": name, **{part: [] for part in LISTS}})
        for part in LISTS:
            trace[part] += delta.get(part, ())
        trace.update(delta.get("set", {}))
        return is_new

    def finish(self, reply: JsonObject) -> Episode:
        """Return the assembled episode; raises a ValueError if the server rejected the task, or a part is missing."""
        if not reply.get("success"):
            raise ValueError(f"verifiers refused the task: {cut_line(str(reply.get('error')))}")
        for summary in reply["traces"]:
            trace = self._traces.get(summary["id"])
            if trace is None or any(len(trace[part]) != summary[part] for part in ("nodes", "calls")):
                raise ValueError("a part of the episode did not arrive")
        traces = [self._traces[summary["id"]] for summary in reply["traces"]]
        return Episode.model_validate({**reply["head"], "traces": traces})
