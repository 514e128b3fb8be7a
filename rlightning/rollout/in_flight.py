"""Prompts in flight, and the bound on the staleness of their tokens.

::

    add -> waiting -> running -> finished -> select_ready -> pop_selected
              ^          |          |
              +----------+----------+   requeue_stale, requeue_changed, requeue_all

A token's staleness is the number of updates between the weights that sampled it and the weights that are updated with
it: at weight version v every token of a selected group has a version of at least v - max_staleness. Groups with the
oldest tokens are selected first. A step waits, within limits, for groups that would be too stale for the next step:
requeueing drops sampled tokens, mostly of long completions. Groups that were sampled with other settings than the
step's, such as groups of another size in a resumed run, are requeued too.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from rlightning.types import Prompt, Trajectory
from rlightning.types.trajectory import from_plain, to_plain

log = logging.getLogger(__name__)

SEED_OFFSET_PER_ATTEMPT = 1 << 52
"""Offset between the random streams of two attempts at a group; the streams of first attempts are below it."""
MAX_SURPLUS_GROUPS = 4
"""Surplus of finished groups, for each running group that is too old for later steps, at which a step stops waiting."""


class SavedGroup(TypedDict):
    """A :class:`Group` in a checkpoint, as plain types; checkpoints of earlier releases lack the last two keys."""

    prompt: dict[str, Any]
    stream: int
    settings: dict[str, object] | None
    trajectories: NotRequired[list[dict[str, Any]] | None]
    saved: NotRequired[list[Any] | None]


SavedGroups = dict[str, list[SavedGroup]]
"""The groups in flight in a checkpoint, under the key ``groups``."""


@dataclass(eq=False, slots=True)
class Group:
    """One prompt with its trajectories: a group that is waiting, running or finished.

    Attributes:
        prompt: the prompt to complete.
        stream: number of the group's random stream, which changes with each attempt.
        number: position in the order in which groups were added.
        first_weight_version: the oldest version that sampled one of the group's tokens; None without tokens, or while
            the group waits.
        trajectories: the finished trajectories; None until all have ended.
        settings: settings with which the group is sampled (:func:`~rlightning.rollout.sampler.sampling_settings`); None
            while it waits.
        saved: unfinished trajectories from a checkpoint, as plain types; None if there are none.
        unscored: the trajectories of a running group of which only the scores are missing; else None.
    """

    prompt: Prompt
    stream: int
    number: int
    first_weight_version: int | None = None
    trajectories: list[Trajectory] | None = None
    settings: dict[str, object] | None = None
    saved: list[Any] | None = None
    unscored: list[Trajectory] | None = None

    def requeue(self) -> None:
        """Discard the group's trajectories, so that it waits to be sampled again, from another random stream.

        Trajectories of the same stream could take as long again.
        """
        self.first_weight_version = self.trajectories = self.settings = self.saved = self.unscored = None
        self.stream += SEED_OFFSET_PER_ATTEMPT


@dataclass(slots=True)
class InFlight:
    """The groups in flight, in the order in which their prompts were added.

    Args:
        max_staleness: maximum staleness of a token when it is trained on, in updates.

    Attributes:
        num_stale: number of groups that were requeued as too stale since the last :meth:`pop_selected`.
        num_added: number of groups that were added since the last :meth:`clear`; the number of the next one.
    """

    max_staleness: int
    num_stale: int = 0
    num_added: int = 0
    _groups: list[Group] = field(default_factory=list)
    _finished: list[Group] = field(default_factory=list)
    _selected: list[Group] = field(default_factory=list)
    _at_step_start: list[Group] | None = None

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def running(self) -> list[Group]:
        """Groups that are being sampled."""
        return [one for one in self._groups if one.first_weight_version is not None and one.trajectories is None]

    @property
    def waiting(self) -> list[Group]:
        """Groups that are not being sampled yet."""
        return [group for group in self._groups if group.first_weight_version is None and group.trajectories is None]

    @property
    def num_started(self) -> int:
        """Number of groups that are running or finished."""
        return len(self._groups) - len(self.waiting)

    @property
    def num_finished(self) -> int:
        """Number of finished groups that are not selected yet."""
        return len(self._finished)

    def add(self, prompts: Iterable[tuple[Prompt, int]]) -> None:
        """Add prompts, each with the number of its random stream, as groups that wait to be sampled."""
        for prompt, stream in prompts:
            self._groups.append(Group(prompt, stream, self.num_added))
            self.num_added += 1

    def discard(self, numbers: Collection[int]) -> None:
        """Remove the groups with these numbers, since a step that was interrupted adds its prompts again."""
        self._groups, self._finished, self._selected = (
            [group for group in groups if group.number not in numbers]
            for groups in (self._groups, self._finished, self._selected)
        )

    def finish(self, group: Group, trajectories: list[Trajectory]) -> None:
        """Move a group of which all trajectories have ended to the finished groups, from which training takes them."""
        group.trajectories, group.saved, group.unscored = trajectories, None, None
        group.first_weight_version = _first_version(trajectories)
        self._finished.append(group)

    def hold_unscored(self, group: Group, trajectories: list[Trajectory]) -> None:
        """Keep the trajectories of a running group of which only the scores are missing, and set the group's first
        weight version to that of their tokens: the request may have waited until the engine had newer weights.
        """
        group.unscored = trajectories
        if (version := _first_version(trajectories)) is not None:
            group.first_weight_version = version

    def requeue_stale(self, weight_version: int) -> list[Group]:
        """Requeue groups whose tokens are too stale for an update of weights of this version.

        Returns:
            The requeued groups that were running: their requests have to be cancelled.
        """
        old = self._sampled_by(weight_version - self.max_staleness - 1)
        self.num_stale += len(old)
        return self._requeue(old)

    def requeue_changed(self, settings: dict[str, object]) -> list[Group]:
        """Requeue groups that were sampled with other settings than these, and log their number.

        Returns:
            The requeued groups that were running, as for :meth:`requeue_stale`.
        """
        changed = [group for group in self._groups if group.settings not in (None, settings)]
        if changed:
            log.info(
                "%d prompts in flight are requeued: they were sampled with other settings (%s).",
                len(changed),
                _describe_change(changed[0].settings or {}, settings),
            )
        return self._requeue(changed)

    def _requeue(self, groups: Sequence[Group]) -> list[Group]:
        running = [group for group in groups if group.trajectories is None]
        for group in groups:
            group.requeue()
        # An unfinished step may have left selected groups.
        self._finished = [group for group in [*self._selected, *self._finished] if group.trajectories is not None]
        self._selected = []
        return running

    def requeue_all(self) -> int:
        """Requeue all running and finished groups, and return their number."""
        waiting = set(self.waiting)
        started = [group for group in self._groups if group not in waiting]
        self._requeue(started)
        return len(started)

    def suspend(self) -> None:
        """Requeue the running groups that have no saved trajectories from which sampling could continue."""
        self._requeue([group for group in self.running if group.saved is None])

    def select_ready(self, num_groups: int, weight_version: int, *, per_step: int, room: int) -> list[Group]:
        """Select finished groups for :meth:`pop_selected`, those with the oldest tokens first.

        :meth:`requeue_stale` has to be called before.

        Args:
            num_groups: total number of groups to select. If it is below ``per_step``, as for a refill, the step does
                not wait for groups that the next step could not take: its first call has already done so.
            weight_version: version of the weights that the groups will update.
            per_step: number of groups that each later step takes.
            room: maximum number of running and finished groups at the beginning of a step.

        Returns:
            The newly selected groups, in no particular order.
        """
        num_due = 0 if num_groups < per_step else self._count_due(num_groups, weight_version, per_step, room)
        num_spare = len(self._selected) + len(self._finished) - num_groups
        if num_spare >= 0 and (num_due == len(self.running) or num_spare >= MAX_SURPLUS_GROUPS * num_due):
            num_due = 0  # otherwise the engines, which run nothing else, or the trainer would wait too long
        places = max(num_groups - num_due - len(self._selected), 0)
        self._finished.sort(
            key=lambda group: weight_version if group.first_weight_version is None else group.first_weight_version
        )
        selected, self._finished = self._finished[:places], self._finished[places:]
        self._selected += selected
        return selected

    @property
    def num_selected(self) -> int:
        """Number of selected groups."""
        return len(self._selected)

    def _count_due(self, num_groups: int, weight_version: int, per_step: int, room: int) -> int:
        """Return the number of running groups for which this step must wait, since later steps cannot take them all.

        Groups whose first weight version is ``weight_version - max_staleness + n`` can be taken by this step and n
        more. The step does not wait for groups that no step would take (``oversample``).
        """
        num_due = 0
        for num_steps in range(self.max_staleness):
            pressing = self._sampled_by(weight_version - self.max_staleness + num_steps)
            num_complete = sum(group.trajectories is not None for group in pressing)
            can_wait = room - (self.max_staleness + 1 - num_steps) * per_step
            num_due = max(num_due, min(len(pressing) - can_wait, num_groups) - num_complete)
        return num_due

    def _sampled_by(self, weight_version: int) -> list[Group]:
        first = [(group, group.first_weight_version) for group in self._groups]
        return [group for group, version in first if version is not None and version <= weight_version]

    def pop_selected(self) -> list[Group]:
        """Remove the selected groups and return them, in the order in which they were added."""
        taken, self._selected = self._selected, []
        selected = set(taken)
        self._groups = [group for group in self._groups if group not in selected]
        self.num_stale = 0
        return sorted(taken, key=lambda group: group.number)

    def clear(self) -> None:
        """Remove all groups, because another run begins."""
        self._groups, self._finished, self._selected, self._at_step_start = [], [], [], None
        self.num_added = self.num_stale = 0

    # Checkpoints

    def begin_step(self) -> None:
        """Keep a list of the groups in flight, which a checkpoint during the step saves: a resume repeats the step."""
        self._at_step_start = list(self._groups)

    def end_step(self) -> None:
        """Discard the list that :meth:`begin_step` keeps for checkpoints, because the step has ended."""
        self._at_step_start = None

    def state_dict(self, *, at_step_start: bool = True) -> SavedGroups:
        """Return the groups in flight as plain types: finished trajectories, and prompts still to be completed.

        Args:
            at_step_start: in a step that has not ended, whether to return the state at its start.
        """
        groups = self._at_step_start if at_step_start and self._at_step_start is not None else self._groups
        return {"groups": [_pack(group) for group in groups]}

    def load_state_dict(self, state: SavedGroups) -> None:
        """Restore the groups of a checkpoint: finished ones stay finished, partly saved ones run, all others wait."""
        self.clear()
        for packed in state["groups"]:
            self.add([(Prompt(**packed["prompt"]), packed["stream"])])
            group = self._groups[-1]
            if versions := _saved_versions(packed):
                group.saved, group.settings = packed.get("saved"), packed["settings"]
                group.first_weight_version = min(versions)
            if (trajectories := packed.get("trajectories")) is not None:
                group.settings = packed["settings"]
                self.finish(group, [from_plain(one, group.prompt) for one in trajectories])


def _saved_versions(packed: SavedGroup) -> list[int]:
    saved = packed.get("saved") or ()
    branches = [branch for one in saved if one is not None for branch in one["trajectory"]["branches"]]
    return [version for branch in branches for version in branch["weight_versions"] if version >= 0]


def _first_version(trajectories: Sequence[Trajectory]) -> int | None:
    """Return the oldest version of the weights that sampled a token; None without tokens."""
    samples = [sample for one in trajectories for sample in one.samples]
    return min((min(one.weight_versions) for one in samples if one.weight_versions), default=None)


def _describe_change(old: Mapping[str, object], new: Mapping[str, object]) -> str:
    changed = [f"{key}: {old[key]}, now {value}" for key, value in new.items() if key in old and old[key] != value]
    return "; ".join(changed)


def token_staleness(groups: Sequence[Group], weight_version: int) -> NDArray[np.int64]:
    """Return the staleness of each sampled token of ``groups`` at a weight version, in updates: [T]."""
    trajectories = [one for group in groups for one in group.trajectories or ()]
    versions = [np.asarray(sample.weight_versions) for one in trajectories for sample in one.samples]
    return np.asarray(weight_version - np.concatenate([np.zeros(0, np.int64), *versions]), np.int64)


def _pack(group: Group) -> SavedGroup:
    trajectories = group.trajectories if group.unscored is None else group.unscored
    return {
        "prompt": group.prompt._asdict(),
        "stream": group.stream,
        "settings": group.settings,
        "trajectories": None if trajectories is None else [to_plain(one) for one in trajectories],
        "saved": group.saved,
    }
