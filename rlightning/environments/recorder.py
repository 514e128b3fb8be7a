"""Records the turns and branches of a trajectory, with each token exactly as it was sampled.

A request whose history begins with all tokens of a branch extends the branch; any other request begins a new branch,
whose history is not trained on again. Requests may be concurrent: each reserves its branch until it has ended.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from rlightning.environments.messages import AssistantMessage, Message
from rlightning.types.trajectory import Branch, BranchReason, Sample, Turn, samples_of

SHARED_TOKENS = 1024
"""Tokens of two sequences that are compared at once; comparing one by one would block the shared event loop."""


@dataclass(eq=False, slots=True)
class Reservation:
    """A branch that one request will extend, reserved so that no concurrent request extends it too. ``history`` are the
    tokens [L] after which the request samples.

    If ``branch`` is None, the request begins a new one, for ``reason``.
    """

    history: list[int]
    branch: Branch | None
    reason: BranchReason


class RecordedTurn(NamedTuple):
    """A turn of the policy as recorded: its sample, message and branch, and the branch's length ``end`` after it in
    tokens.
    """

    sample: Sample
    message: AssistantMessage
    branch: Branch
    end: int

    @property
    def token_ids(self) -> "array[int]":
        """The branch's tokens up to the end of the turn: [L]."""
        return self.branch.token_ids[: self.end]


class Mark(NamedTuple):
    """A point in a recording: the number of turns, and of tokens in each branch."""

    num_turns: int
    num_tokens: list[int]


class Recorder:
    """Stores one trajectory: its branches in the order in which they began, and its turns in the order in which they
    ended.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self.branches: list[Branch] = []
        self.turns: list[Turn] = []
        self._is_started = False
        self._reserved: set[int] = set()
        """``id`` of the branches that a request is about to extend."""

    def load(self, branches: Sequence[Branch], turns: Sequence[Turn]) -> None:
        """Replace the recording by these branches and turns."""
        self.branches, self.turns, self._is_started = list(branches), list(turns), bool(branches)

    def mark(self) -> "Mark":
        """Return the present size of the recording, for :meth:`until`."""
        return Mark(len(self.turns), [len(branch.token_ids) for branch in self.branches])

    def until(self, mark: "Mark") -> tuple[list[Branch], list[Turn]]:
        """Return the branches and turns as they were at a mark. Thread-safe."""
        branches = [branch.first(count) for branch, count in zip(self.branches, mark.num_tokens, strict=False)]
        return branches, self.turns[: mark.num_turns]

    @property
    def samples(self) -> list[Sample]:
        """The policy's samples, in the order of their turns."""
        return samples_of(self.turns)

    def metrics(self) -> dict[str, float]:
        """Return the numbers of turns and of branches, as metrics of the trajectory."""
        return {"turns": float(len(self.samples)), "branches": float(len(self.branches))}

    def reserve(self, history: Sequence[int], reason: BranchReason | None = None) -> Reservation:
        """Return a reservation for the longest free branch that a request's history extends, or for a new branch if
        there is none. It holds until :meth:`record` or :meth:`release`.

        Args:
            history: [L], the request's token ids.
            reason: why a new branch begins if none can be extended; None to infer it from the tokens.
        """
        history = list(history)
        free = [branch for branch in self.branches if id(branch) not in self._reserved and _begins(history, branch)]
        if free:
            branch = max(free, key=lambda one: len(one.token_ids))
            self._reserved.add(id(branch))
            return Reservation(history, branch, branch.reason)
        if not self._is_started:
            reason = "start"
        self._is_started = True
        return Reservation(history, None, reason or self._find_reason(history))

    def release(self, reservation: Reservation) -> None:
        """Cancel the reservation of a request that failed, so that other requests may extend its branch."""
        if reservation.branch is not None:
            self._reserved.discard(id(reservation.branch))

    def record(
        self,
        reservation: Reservation,
        samples: Sequence[Sample],
        observations: Sequence[Message] = (),
        messages: Sequence[AssistantMessage] | None = None,
    ) -> list[RecordedTurn]:
        """Record the samples of a request, and return them as turns: the first extends the reserved branch, each
        further one begins a branch.

        Args:
            samples: alternatives after the request's history.
            observations: messages at the end of the history that are not recorded yet.
            messages: the parsed samples; None for their texts.
        """
        self.release(reservation)
        history, branch, reason = reservation.history, reservation.branch, reservation.reason
        self.turns += [Turn(dict(message)) for message in observations]
        observed = len(self.turns) - 1
        recorded = []
        for sample, message in zip(samples, messages or [AssistantMessage(one.text) for one in samples], strict=True):
            if branch is None:
                branch = Branch(reason)
                branch.append(history)
                self.branches.append(branch)
            elif len(history) > len(branch.token_ids):
                branch.append(history[len(branch.token_ids) :], observed)
            branch.append_sample(sample, len(self.turns))
            self.turns.append(Turn(message.to_message(), sample))
            recorded.append(RecordedTurn(sample, message, branch, len(branch.token_ids)))
            branch, reason = None, "sampled_again"
        return recorded

    def extend(self, other: "Recorder", turns: Sequence[Turn] | None = None) -> None:
        """Append the branches and turns of another recorder, which must not record afterwards.

        ``turns`` replaces the other recorder's turns: the same turns in any order, perhaps with further turns between
        them.
        """
        turns = other.turns if turns is None else turns
        places = {id(turn.sample): len(self.turns) + place for place, turn in enumerate(turns) if turn.sample}
        new = {old: places[id(turn.sample)] for old, turn in enumerate(other.turns) if turn.sample}
        for branch in other.branches:
            if branch.reason == "start" and self.branches:
                branch.reason = "started_over"
            branch.turns = array("i", [new.get(turn, -1) for turn in branch.turns])
            self.branches.append(branch)
        self.turns += turns
        self._is_started = self._is_started or other._is_started

    def _find_reason(self, history: list[int]) -> BranchReason:
        """Return why a history begins a new branch, as inferred from its tokens."""
        known = [list(branch.token_ids) for branch in self.branches]
        if any(tokens[: len(history)] == history[: len(tokens)] for tokens in known):
            return "sampled_again"
        starts = [len(one.beginning) for one in self.branches]
        edited = [(tokens, n) for tokens, n in zip(known, starts, strict=True) if history[:n] == tokens[:n]]
        if any(self._is_retokenized(history, tokens, start) for tokens, start in edited):
            return "retokenized"
        return "history_edited" if edited else "started_over"

    def _is_retokenized(self, history: list[int], tokens: list[int], start: int) -> bool:
        """Return whether a history has the same text as a branch, but other tokens from position ``start`` on."""
        while history[start : start + SHARED_TOKENS] == tokens[start : start + SHARED_TOKENS]:
            start += SHARED_TOKENS
        start = next(place for place in count(start) if history[place] != tokens[place])
        return self._decode(history[start:]).startswith(self._decode(tokens[start:]))


def _begins(history: list[int], branch: Branch) -> bool:
    known = branch.token_ids
    return len(known) <= len(history) and history[: len(known)] == list(known)
