"""Prompts that have been handed in and not yet been consumed, and the bound on how old their tokens may be.

::

    admit -> running -> finished -> take          at version v of the weights, every token of what is taken has
               ^            |                     a version of at least v - max_staleness
               +-- expire <-+                     what could not be taken any more begins again

The age of a token is the number of updates between the weights that sampled it and those that it updates.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rlightning.types import Completion, Prompt

OWNER = 0
"""The rank that knows what is in flight."""
NEXT_STREAM = 1 << 52
"""From a group's random stream to that of its next attempt; a step's streams are below
(:class:`~rlightning.callbacks.VLLMRollout`)."""


class Consumed(NamedTuple):
    """What a rank gets for the prompts that it handed in.

    Attributes:
        prompts: as many, of any rank and any time.
        completions: of each.
        metrics: of what all ranks have got in this step.
    """

    prompts: list[Prompt]
    completions: list[list[Completion]]
    metrics: dict[str, float]

    @classmethod
    def of(cls, completed: Sequence[tuple["Group", list[Completion]]], metrics: dict[str, float]) -> "Consumed":
        """Groups and their completions."""
        return cls([group.prompt for group, _ in completed], [found for _, found in completed], metrics)


@dataclass(eq=False, slots=True)
class Group:
    """One prompt and its completions, as far as they are there.

    Attributes:
        prompt: what is completed.
        stream: number of its random stream; another one when it begins again.
        number: its place in the order of admission.
        begun: the version of the weights that its first token may be of; None: nobody has been asked yet.
        completions: once all of them have ended.
    """

    prompt: Prompt
    stream: int
    number: int
    begun: int | None = None
    completions: list[Completion] | None = None

    @property
    def oldest_version(self) -> int | None:
        """No token of it is of older weights; None: of no weights yet."""
        if self.completions is None:
            return self.begun
        return min((int(c.weight_versions.min()) for c in self.completions if len(c.weight_versions)), default=None)

    def begin_again(self) -> None:
        """Forget what has been sampled; the same numbers under nearly the same weights would take as long again."""
        self.begun = self.completions = None
        self.stream += NEXT_STREAM


@dataclass(slots=True)
class InFlight:
    """The groups in flight, in the order of their admission.

    Args:
        max_staleness: the greatest age of a token when it is consumed, in updates.

    Attributes:
        num_expired: groups that began again because they had grown too old, since the last :meth:`take`.
    """

    max_staleness: int
    num_expired: int = 0
    _groups: list[Group] = field(default_factory=list)
    _finished: list[Group] = field(default_factory=list)
    _at_step_start: list[Group] | None = None
    _num_admitted: int = 0

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def num_begun(self) -> int:
        """How many are under way or complete."""
        return len(self._groups) - len(self.waiting)

    @property
    def finished(self) -> list[Group]:
        """Those that are complete, in the order in which they ended."""
        return list(self._finished)

    @property
    def num_finished(self) -> int:
        """How many of them nobody works on any more."""
        return len(self._finished)

    @property
    def waiting(self) -> list[Group]:
        """Those that nobody works on yet."""
        return [group for group in self._groups if group.begun is None and group.completions is None]

    def admit(self, prompts: Iterable[tuple[Prompt, int]]) -> None:
        """Take in prompts, each with the number of its random stream."""
        for prompt, stream in prompts:
            self._groups.append(Group(prompt, stream, self._num_admitted))
            self._num_admitted += 1

    def finish(self, group: Group, completions: list[Completion]) -> None:
        """Note that a group is complete."""
        group.completions = completions
        self._finished.append(group)

    def expire(self, weight_version: int) -> list[Group]:
        """Have begin again what is too old to be taken at this version or a later one.

        Returns:
            Those of them that somebody still works on.
        """
        least = weight_version - self.max_staleness
        old = [group for group in self._groups if (oldest := group.oldest_version) is not None and oldest < least]
        running = [group for group in old if group.completions is None]
        for group in old:
            group.begin_again()
        self._finished = [group for group in self._finished if group.completions is not None]
        self.num_expired += len(old)
        return running

    def stop(self) -> list[Group]:
        """Have all that are under way begin again later; those of them."""
        running = [group for group in self._groups if group.begun is not None and group.completions is None]
        for group in running:
            group.begin_again()
        return running

    def take(self, num_groups: int) -> list[Group]:
        """Consume the first that finished; what is too old has to be expired before.

        Returns:
            ``num_groups`` groups, in the order of their admission.
        """
        assert len(self._finished) >= num_groups
        taken = self._finished[:num_groups]
        del self._finished[:num_groups]
        self._groups = [group for group in self._groups if group not in set(taken)]
        self.num_expired = 0
        return sorted(taken, key=lambda group: group.number)

    def take_numbers(self, numbers: Iterable[int]) -> None:
        """Consume the groups of these numbers, whose completions are where they are needed."""
        taken = set(numbers)
        self._groups = [group for group in self._groups if group.number not in taken]

    def clear(self) -> None:
        """Forget everything: another run begins."""
        self._groups, self._finished, self._at_step_start = [], [], None
        self._num_admitted = self.num_expired = 0

    # Checkpoints

    def begin_step(self) -> None:
        """Remember what is in flight: an unfinished step is repeated from here."""
        self._at_step_start = list(self._groups)

    def end_step(self) -> None:
        """The step is done, and what it consumed with it."""
        self._at_step_start = None

    def state_dict(self) -> dict[str, Any]:
        """What is in flight, or was at the start of an unfinished step: finished completions, prompts to complete."""
        groups = self._groups if self._at_step_start is None else self._at_step_start
        return {"groups": [_pack(group) for group in groups]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint: what was finished is, and everything else begins again."""
        self.clear()
        for packed in state["groups"]:
            self.admit([(Prompt(**packed["prompt"]), packed["stream"])])
            if packed["completions"] is not None:
                self.finish(self._groups[-1], [_unpack(one) for one in packed["completions"]])


def ages(groups: Sequence[Group], weight_version: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """How old each sampled token of ``groups`` is at this version: [T] updates."""
    versions = [one.weight_versions for group in groups for one in group.completions or ()]
    return weight_version - np.concatenate([np.zeros(0, np.int64), *versions])


def _pack(group: Group) -> dict[str, Any]:
    completions = group.completions
    return {
        "prompt": group.prompt._asdict(),
        "stream": group.stream,
        "completions": None if completions is None else [_as_lists(one) for one in completions],
    }


def _as_lists(completion: Completion) -> dict[str, Any]:
    """Plain types, which every way of saving a checkpoint takes."""
    arrays = ("token_ids", "logprobs", "weight_versions")
    return completion._asdict() | {name: getattr(completion, name).tolist() for name in arrays}


def _unpack(saved: dict[str, Any]) -> Completion:
    return Completion(
        saved["text"],
        np.asarray(saved["token_ids"], np.int64),
        np.asarray(saved["logprobs"], np.float32),
        np.asarray(saved["weight_versions"], np.int32),
        saved["finish_reason"],
    )
