"""Prompts that have been handed in and not yet been consumed, and the bound on how old their tokens may be.

::

    admit -> running -> finished -> choose -> take     at version v of the weights, every token of what is taken
               ^            |                          has a version of at least v - max_staleness
               +-- expire <-+                          what could not be taken any more begins again

The age of a token is the number of updates between the weights that sampled it and those that it updates. The oldest
are chosen first, and what no later step could take is waited for, within reason: a group that begins again has been
sampled for nothing, and it would be the long completions that do. So does what was sampled with other settings than
those of the step that would take it, such as a group of another size in a resumed run.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rlightning.types import Prompt, Trajectory
from rlightning.types.trajectory import from_plain, to_plain

log = logging.getLogger(__name__)

OWNER = 0
"""The rank that knows what is in flight."""
NEXT_STREAM = 1 << 52
"""From a group's random stream to that of its next attempt; a step's streams are below
(:class:`~rlightning.callbacks.VLLMRollout`)."""
PATIENCE = 4
"""For each group that no later step could take, a step waits until so many are complete beyond what it needs."""

STOPPED = "rollout/stopped"
"""The metric of how many prompts a step has begun and not waited for, which begin again: one name for all engines."""


class Consumed(NamedTuple):
    """What a rank gets for the prompts that it handed in.

    Attributes:
        groups: the trajectories of as many prompts, of any rank and any time.
        metrics: of what all ranks have got in this step.
    """

    groups: list[list[Trajectory]]
    metrics: dict[str, float]


@dataclass(eq=False, slots=True)
class Group:
    """One prompt and its trajectories, as far as they are there.

    Attributes:
        prompt: what is completed.
        stream: number of its random stream; another one when it begins again.
        number: its place in the order of admission.
        begun: no token of it is of older weights than this version; None: it has none, and nobody has been asked yet
            unless it is complete.
        trajectories: once all of them have ended.
        settings: what it is sampled with (:func:`~rlightning.rollout.sampler.sampling_settings`); None while it waits.
    """

    prompt: Prompt
    stream: int
    number: int
    begun: int | None = None
    trajectories: list[Trajectory] | None = None
    settings: dict[str, Any] | None = None

    def begin_again(self) -> None:
        """Forget what has been sampled; the same numbers under nearly the same weights would take as long again."""
        self.begun = self.trajectories = self.settings = None
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
    _chosen: list[Group] = field(default_factory=list)
    _at_step_start: list[Group] | None = None
    _num_admitted: int = 0

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def running(self) -> list[Group]:
        """Those that somebody works on."""
        return [group for group in self._groups if group.begun is not None and group.trajectories is None]

    @property
    def waiting(self) -> list[Group]:
        """Those that nobody works on yet."""
        return [group for group in self._groups if group.begun is None and group.trajectories is None]

    @property
    def num_begun(self) -> int:
        """How many are under way or complete."""
        return len(self._groups) - len(self.waiting)

    @property
    def num_finished(self) -> int:
        """How many are complete and not yet chosen."""
        return len(self._finished)

    def admit(self, prompts: Iterable[tuple[Prompt, int]]) -> None:
        """Take in prompts, each with the number of its random stream."""
        for prompt, stream in prompts:
            self._groups.append(Group(prompt, stream, self._num_admitted))
            self._num_admitted += 1

    def finish(self, group: Group, trajectories: list[Trajectory]) -> None:
        """Note that a group is complete."""
        group.trajectories = trajectories
        samples = [sample for one in trajectories for sample in one.samples]
        group.begun = min((min(one.weight_versions) for one in samples if one.weight_versions), default=None)
        self._finished.append(group)

    def expire(self, weight_version: int) -> list[Group]:
        """Requeue prompts whose tokens are too old to be trained on at this version or a later one.

        Returns:
            Those of them that somebody still works on.
        """
        old = self._begun_by(weight_version - self.max_staleness - 1)
        self.num_expired += len(old)
        return self._requeue(old)

    def requeue_changed(self, settings: dict[str, Any]) -> list[Group]:
        """Requeue prompts that were sampled with other settings than these, and log how many.

        Args:
            settings: of :func:`~rlightning.rollout.sampler.sampling_settings`.

        Returns:
            Those of them that somebody still works on.
        """
        changed = [group for group in self._groups if group.settings not in (None, settings)]
        if changed:
            log.info(
                "%d prompts in flight begin again: what they have was sampled with other settings (%s).",
                len(changed),
                _describe_change(changed[0].settings or {}, settings),
            )
        return self._requeue(changed)

    def _requeue(self, groups: Sequence[Group]) -> list[Group]:
        running = [group for group in groups if group.trajectories is None]
        for group in groups:
            group.begin_again()
        # A step that did not end has left what it had chosen.
        self._finished = [group for group in [*self._chosen, *self._finished] if group.trajectories is not None]
        self._chosen = []
        return running

    def stop(self) -> list[Group]:
        """Requeue all prompts that are under way, and return them."""
        running = self.running
        for group in running:
            group.begin_again()
        return running

    def choose(self, num_groups: int, weight_version: int, *, per_step: int, room: int) -> list[Group]:
        """Set aside complete groups for :meth:`take`, the oldest first; what is too old has to be expired before.

        Args:
            num_groups: how many are wanted in all. Fewer than a step takes refill one, and wait for none that is too
                old for the next: that step has done so.
            weight_version: that they will be taken at.
            per_step: how many each later step is going to take.
            room: how many are under way or complete when a step begins.

        Returns:
            Those that were set aside now, in no order.
        """
        num_due = 0 if num_groups < per_step else self._count_due(num_groups, weight_version, per_step, room)
        num_spare = len(self._chosen) + len(self._finished) - num_groups
        if num_spare >= 0 and (num_due == len(self.running) or num_spare >= PATIENCE * num_due):
            num_due = 0  # the engines, which run nothing else, or the trainer would wait for too long
        places = max(num_groups - num_due - len(self._chosen), 0)
        self._finished.sort(key=lambda group: weight_version if group.begun is None else group.begun)
        chosen, self._finished = self._finished[:places], self._finished[places:]
        self._chosen += chosen
        return chosen

    @property
    def num_chosen(self) -> int:
        """How many have been set aside."""
        return len(self._chosen)

    def _count_due(self, num_groups: int, weight_version: int, per_step: int, room: int) -> int:
        """How many that are still running have to be among the next ``num_groups``: later steps cannot take them all.

        After this step n more can take what was begun by version ``weight_version - max_staleness + n``. What there is
        room for beyond what steps take, by ``oversample``, may be left over.
        """
        num_due = 0
        for num_steps in range(self.max_staleness):
            pressing = self._begun_by(weight_version - self.max_staleness + num_steps)
            num_complete = sum(group.trajectories is not None for group in pressing)
            can_wait = room - (self.max_staleness + 1 - num_steps) * per_step
            num_due = max(num_due, min(len(pressing) - can_wait, num_groups) - num_complete)
        return num_due

    def _begun_by(self, weight_version: int) -> list[Group]:
        return [group for group in self._groups if group.begun is not None and group.begun <= weight_version]

    def take(self) -> list[Group]:
        """Consume what has been set aside, in the order of admission."""
        taken, self._chosen = self._chosen, []
        self._groups = [group for group in self._groups if group not in set(taken)]
        self.num_expired = 0
        return sorted(taken, key=lambda group: group.number)

    def take_numbers(self, numbers: Iterable[int]) -> None:
        """Consume the groups of these numbers, whose completions are where they are needed."""
        taken = set(numbers)
        self._groups = [group for group in self._groups if group.number not in taken]

    def clear(self) -> None:
        """Forget everything: another run begins."""
        self._groups, self._finished, self._chosen, self._at_step_start = [], [], [], None
        self._num_admitted = self.num_expired = 0

    # Checkpoints

    def begin_step(self) -> None:
        """Remember what is in flight: an unfinished step is repeated from here."""
        self._at_step_start = list(self._groups)

    def end_step(self) -> None:
        """The step is done, and what it consumed with it."""
        self._at_step_start = None

    def state_dict(self, *, at_step_start: bool = True) -> dict[str, Any]:
        """What is in flight: finished trajectories, prompts to complete.

        Args:
            at_step_start: whether of a step that has not ended what was in flight at its start is wanted.
        """
        groups = self._at_step_start if at_step_start and self._at_step_start is not None else self._groups
        return {"groups": [_pack(group) for group in groups]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint: what was finished is, and everything else begins again."""
        self.clear()
        for packed in state["groups"]:
            self.admit([(Prompt(**packed["prompt"]), packed["stream"])])
            if packed.get("trajectories") is not None:
                group = self._groups[-1]
                group.settings = packed["settings"]
                self.finish(group, [from_plain(one, group.prompt) for one in packed["trajectories"]])


def _describe_change(old: dict[str, Any], new: dict[str, Any]) -> str:
    changed = [f"{key}: {old[key]}, now {value}" for key, value in new.items() if key in old and old[key] != value]
    return "; ".join(changed)


def ages(groups: Sequence[Group], weight_version: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """How old each sampled token of ``groups`` is at this version: [T] updates."""
    trajectories = [one for group in groups for one in group.trajectories or ()]
    versions = [np.asarray(sample.weight_versions) for one in trajectories for sample in one.samples]
    sampled: np.ndarray[Any, np.dtype[np.int64]] = np.concatenate([np.zeros(0, np.int64), *versions])
    return weight_version - sampled


def _pack(group: Group) -> dict[str, Any]:
    trajectories = group.trajectories
    return {
        "prompt": group.prompt._asdict(),
        "stream": group.stream,
        "settings": group.settings,
        "trajectories": None if trajectories is None else [to_plain(one) for one in trajectories],
    }
