"""Prompts in flight: the bound on staleness holds in any order in which completions end."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlightning.rollout import Sampling
from rlightning.rollout.in_flight import MAX_SURPLUS_GROUPS, Group, InFlight, token_staleness
from rlightning.rollout.sampler import sampling_settings
from rlightning.types import Prompt, Sample, Trajectory


def trajectory(*versions: int) -> Trajectory:
    count = len(versions)
    return Trajectory.single_turn(prompt(0), Sample(range(count), [-0.5] * count, versions, "", "stop"))


def prompt(index: int) -> Prompt:
    return Prompt(index, str(index), [index], {"answer": str(index)})


def indices(groups: list[Group]) -> list[int]:
    return [group.prompt.index for group in groups]


def admit(flight: InFlight, *numbers: int) -> list[Group]:
    flight.add((prompt(number), number) for number in numbers)
    return flight.waiting


def begin(flight: InFlight, version: int, *numbers: int) -> list[Group]:
    """Admit prompts, and count them as being sampled."""
    groups = [group for group in admit(flight, *numbers) if group.prompt.index in numbers]
    for group in groups:
        group.first_weight_version = version
    return groups


def finish(flight: InFlight, *groups: Group) -> None:
    for group in groups:
        assert group.first_weight_version is not None
        flight.finish(group, [trajectory(group.first_weight_version)])


def choose(flight: InFlight, version: int, *, per_step: int, spare: int = 0) -> list[int]:
    """What a step sets aside, where so many prompts are in flight as the staleness lets it."""
    room = (flight.max_staleness + 1) * per_step + spare
    return sorted(indices(flight.select_ready(per_step, version, per_step=per_step, room=room)))


def test_first_finished_groups_are_taken_in_admission_order() -> None:
    flight = InFlight(1)
    groups = begin(flight, 0, 0, 1, 2, 3)
    finish(flight, groups[3])
    assert choose(flight, 0, per_step=2) == [3]
    finish(flight, groups[1], groups[2])
    assert choose(flight, 0, per_step=2) == [1]
    assert indices(flight.pop_selected()) == [1, 3]
    assert (len(flight), flight.num_finished, flight.num_selected) == (2, 1, 0)


def test_the_oldest_are_taken_first() -> None:
    flight = InFlight(3)
    new, old = begin(flight, 2, 0), begin(flight, 1, 1)
    finish(flight, *new, *old)
    assert choose(flight, 2, per_step=1) == [1]


def test_step_waits_for_groups_no_later_takes() -> None:
    flight = InFlight(1)
    old = begin(flight, 0, 0, 1)
    new = begin(flight, 1, 2, 3, 4, 5)
    finish(flight, *new[:3])
    assert choose(flight, 1, per_step=3) == [2]  # two places are kept for the old ones: at 2 they are too old
    finish(flight, old[0])
    assert choose(flight, 1, per_step=3) == [0]
    finish(flight, new[3])
    assert choose(flight, 1, per_step=3) == [3]  # engines would run nothing but the other one
    assert flight.running == [old[1]]


def test_step_awaits_old_groups_beyond_later_capacity() -> None:
    flight = InFlight(2)
    old = begin(flight, 0, *range(8))
    new = begin(flight, 1, *range(8, 12))
    finish(flight, *new)
    # At 1 and at 2 four of the old ones can be taken each, so at 1 all four places are theirs.
    assert choose(flight, 1, per_step=4) == []
    finish(flight, *old[:3])
    assert choose(flight, 1, per_step=4) == [0, 1, 2]
    finish(flight, old[3])
    assert choose(flight, 1, per_step=4) == [3]


def test_later_steps_capacity_reduces_awaited_old_groups() -> None:
    flight = InFlight(2)
    begin(flight, 0, *range(5))
    finish(flight, *begin(flight, 1, *range(5, 9)))
    # One of the five has to be taken at 1, so that there are no more than four at 2.
    assert len(choose(flight, 1, per_step=4)) == 3


def test_step_does_not_wait_for_surplus() -> None:
    flight = InFlight(1)
    old = begin(flight, 0, *range(5))
    begin(flight, 1, 5)
    finish(flight, *old[:3])
    assert choose(flight, 1, per_step=3) == [0, 1, 2]  # the other two begin again


def test_refill_does_not_wait_for_old_groups() -> None:
    flight = InFlight(1)
    begin(flight, 0, 0)
    new = begin(flight, 1, 1, 2, 3)
    finish(flight, new[0])
    assert indices(flight.select_ready(1, 1, per_step=2, room=4)) == [1]


@pytest.mark.parametrize("num_old", [1, 2])
def test_large_surplus_ends_wait_for_few_old_groups(num_old: int) -> None:
    flight, beyond = InFlight(3), num_old * MAX_SURPLUS_GROUPS
    old = begin(flight, 0, *range(num_old))
    new = begin(flight, 3, *range(num_old, num_old + 6 + beyond))
    finish(flight, *new[: 3 + beyond])
    assert len(choose(flight, 3, per_step=4)) == 4 - num_old
    finish(flight, new[3 + beyond])
    assert len(choose(flight, 3, per_step=4)) == num_old
    assert flight.pop_selected() == new[:4]
    assert flight.requeue_stale(4) == old


def test_last_place_of_step_waits_for_old_group() -> None:
    flight = InFlight(2)
    old = begin(flight, 0, 0, 1)
    finish(flight, *begin(flight, 2, 2, 3))
    assert choose(flight, 2, per_step=3) == [2]  # there are three only when an old one has come
    finish(flight, old[0])
    assert choose(flight, 2, per_step=3) == [0, 3]  # nothing but the other one is left to run


def test_spare_old_groups_may_exceed_max_staleness() -> None:
    flight = InFlight(1)
    begin(flight, 0, 0, 1)
    new = begin(flight, 1, 2, 3)
    finish(flight, *new)
    assert choose(flight, 1, per_step=1, spare=1) == []  # one of the two old ones can be left out, the other not
    assert choose(flight, 1, per_step=1, spare=2) == [2]


def test_groups_selected_by_unfinished_step_stay_available() -> None:
    flight = InFlight(1)
    finish(flight, *begin(flight, 0, 0), *begin(flight, 1, 1))
    assert choose(flight, 1, per_step=2) == [0, 1]
    assert flight.requeue_stale(2) == []
    assert (indices(flight.waiting), flight.num_finished) == ([0], 1)
    assert choose(flight, 2, per_step=1) == [1]


def test_what_is_too_old_begins_again() -> None:
    flight = InFlight(1)
    finished, running, fresh, waiting = admit(flight, 0, 1, 2, 3)
    finished.first_weight_version = running.first_weight_version = 0
    fresh.first_weight_version = 1
    flight.finish(finished, [trajectory(2, 2), trajectory(0, 1, 2)])  # its oldest token decides
    (queued,) = begin(flight, 0, 4)
    flight.finish(queued, [trajectory(1, 2)])  # it has waited in an engine until the next weights were there
    assert flight.requeue_stale(1) == []
    assert flight.requeue_stale(2) == [running]  # the only one that is still being sampled
    assert indices(flight.waiting) == [0, 1, 3]
    assert (flight.num_finished, flight.num_stale) == (1, 2)
    assert fresh.first_weight_version == 1 and waiting.first_weight_version is None
    assert choose(flight, 2, per_step=1) == [4]
    assert (indices(flight.pop_selected()), flight.num_stale) == ([4], 0)


def test_requeued_groups_draw_other_numbers() -> None:
    flight = InFlight(0)
    running, finished, waiting = admit(flight, 0, 1, 2)
    running.first_weight_version = finished.first_weight_version = 0
    flight.finish(finished, [trajectory(0)])
    assert flight.requeue_stale(1) == [running]
    assert (running.stream > 1 << 50, finished.stream > 1 << 50, waiting.stream) == (True, True, 2)
    before = running.stream
    running.first_weight_version = 0
    assert flight.requeue_all() == 1
    assert running.stream > before and waiting.stream == 2
    assert flight.waiting == [running, finished, waiting] and flight.num_finished == 0


def test_a_completion_without_tokens_has_no_age() -> None:
    flight = InFlight(0)
    (group,) = begin(flight, 0, 0)
    flight.finish(group, [trajectory()])
    assert (flight.requeue_stale(7), flight.num_stale, flight.num_finished) == ([], 0, 1)
    assert choose(flight, 7, per_step=1) == [0]
    assert token_staleness(flight.pop_selected(), 7).tolist() == []


def test_ages_are_counted_in_updates() -> None:
    flight = InFlight(3)
    (group,) = admit(flight, 0)
    flight.finish(group, [trajectory(2, 3, 5), trajectory(5)])
    assert token_staleness([group], 5).tolist() == [3, 2, 0, 0]


def test_a_checkpoint_holds_what_is_in_flight() -> None:
    flight = InFlight(1)
    first, second = admit(flight, 4, 5)
    first.first_weight_version = second.first_weight_version = 0
    flight.finish(second, [trajectory(0, 1)])
    resumed = InFlight(1)
    resumed.load_state_dict(flight.state_dict())
    assert indices(resumed.waiting) == [4]  # it begins again
    assert (resumed.requeue_stale(1), resumed.num_stale) == ([], 0)
    assert choose(resumed, 1, per_step=1) == [5]
    (taken,) = resumed.pop_selected()
    assert taken.prompt == prompt(5) and taken.stream == 5
    assert taken.trajectories == [replace(trajectory(0, 1), prompt=prompt(5))]
    resumed.load_state_dict(flight.state_dict())
    assert (resumed.requeue_stale(2), resumed.num_stale) == ([], 1)  # what was finished grows old too


SETTINGS = sampling_settings(2, Sampling(max_new_tokens=8, seed=0))


def sampled_with(settings: dict[str, Any]) -> tuple[InFlight, list[Group]]:
    """One prompt that waits, one under way, one complete and one chosen, all but the first begun with ``settings``."""
    flight = InFlight(1)
    groups = admit(flight, 0, 1, 2, 3)
    for group in groups[1:]:
        group.first_weight_version, group.settings = 0, settings
    flight.finish(groups[3], [trajectory(0)])
    assert choose(flight, 0, per_step=1) == [3]
    flight.finish(groups[2], [trajectory(0)])
    return flight, groups


@pytest.mark.parametrize(
    ("num_samples", "changes", "told"),
    [
        (4, {}, "(model.samples_per_prompt: 2, now 4)"),
        (2, {"temperature": 0.7}, "(rollout.temperature: 1.0, now 0.7)"),
        (2, {"max_new_tokens": 4}, "(rollout.max_new_tokens: 8, now 4)"),
        (2, {"top_p": 0.9, "top_k": 5}, "(rollout.top_p: 1.0, now 0.9; rollout.top_k: 0, now 5)"),
        (2, {"min_p": 0.1}, "(rollout.min_p: 0.0, now 0.1)"),
        (2, {"stop": ("=",)}, "(rollout.stop: [], now ['='])"),
        (2, {"stop_token_ids": (3,)}, "(rollout.stop_token_ids: [], now [3])"),
    ],
)
def test_groups_of_other_settings_are_requeued_once(
    num_samples: int, changes: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="rlightning")
    flight, groups = sampled_with(SETTINGS)
    changed = sampling_settings(num_samples, Sampling(**{"max_new_tokens": 8} | changes))
    assert flight.requeue_changed(changed) == [groups[1]]  # the only one that is still being sampled
    assert flight.waiting == groups and flight.num_finished == flight.num_selected == flight.num_stale == 0
    assert flight.requeue_changed(changed) == []
    (line,) = caplog.messages
    assert line.startswith("3 prompts in flight are requeued") and told in line


def test_groups_of_another_seed_go_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="rlightning")
    flight, groups = sampled_with(SETTINGS)
    assert flight.requeue_changed(sampling_settings(2, Sampling(max_new_tokens=8, seed=1))) == []
    assert (flight.waiting, flight.running, flight.num_finished) == (groups[:1], groups[1:2], 2)
    assert caplog.messages == []


@pytest.mark.parametrize("is_known", [True, False])
def test_a_checkpoint_holds_what_groups_were_sampled_with(is_known: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="rlightning")
    state = json.loads(json.dumps(sampled_with(SETTINGS)[0].state_dict()))
    if not is_known:  # as earlier releases wrote it
        for group in state["groups"]:
            group["completions"] = group.pop("trajectories")
    resumed = InFlight(1)
    resumed.load_state_dict(state)
    assert indices(resumed.waiting) == ([0, 1] if is_known else [0, 1, 2, 3])
    assert resumed.requeue_changed(SETTINGS) == []
    assert (caplog.messages, resumed.num_finished) == ([], 2 if is_known else 0)


def test_an_unfinished_step_is_repeated_from_its_start() -> None:
    flight = InFlight(1)
    (first,) = admit(flight, 0)
    flight.begin_step()
    first.first_weight_version = 0
    flight.finish(first, [trajectory(0)])
    admit(flight, 1)  # the step's own prompt, which the data module will give again
    assert choose(flight, 0, per_step=1) == [0]
    flight.pop_selected()
    resumed = InFlight(1)
    resumed.load_state_dict(flight.state_dict())
    assert (len(resumed), resumed.num_finished) == (1, 1)
    flight.end_step()
    resumed.load_state_dict(flight.state_dict())
    assert indices(resumed.waiting) == [1]


def test_trajectories_being_scored_have_their_tokens_version() -> None:
    """They may have waited through a sync; with the version of their request they would be requeued."""
    flight = InFlight(1)
    (group,) = admit(flight, 0)
    group.first_weight_version = 0
    flight.hold_unscored(group, [trajectory(1)])
    assert flight.requeue_stale(2) == [] and flight.running == [group]
    assert flight.requeue_stale(3) == [group] and group.unscored is None


def test_nothing_of_a_run_before_is_left() -> None:
    flight = InFlight(1)
    first, second = admit(flight, 0, 1)
    first.first_weight_version = second.first_weight_version = 0
    flight.finish(first, [trajectory(0)])
    assert choose(flight, 0, per_step=1) == [0]
    flight.begin_step()
    flight.clear()
    flight.requeue_stale(2)
    assert (len(flight), flight.num_finished, flight.num_selected, flight.num_stale) == (0, 0, 0, 0)
    assert flight.state_dict() == {"groups": []}


class Engines:
    """Stand-ins that sample a token a turn for each group at work, from the weights of that time."""

    def __init__(self) -> None:
        self.work: dict[Group, list[int]] = {}

    def run(self, speeds: list[int], version: int, flight: InFlight) -> None:
        """One turn: as many tokens for each group as its speed says; a group ends with its fourth token."""
        for (group, tokens), speed in zip(list(self.work.items()), speeds, strict=False):
            tokens += [version] * speed
            if len(tokens) >= 4:
                flight.finish(group, [trajectory(*tokens[:4])])
                del self.work[group]


@pytest.mark.long
@settings(deadline=None)
@given(max_staleness=st.integers(0, 4), data=st.data())
def test_staleness_bound_holds_and_no_prompt_is_lost(max_staleness: int, data: Any) -> None:
    per_step, flight, engines = 3, InFlight(max_staleness), Engines()
    consumed: list[int] = []
    handed_in = 0
    speeds = st.lists(st.sampled_from([0, 0, 1, 2, 4]), min_size=20, max_size=20)
    for version in range(6):
        for group in flight.requeue_stale(version):
            del engines.work[group]
        new = per_step + max(max_staleness * per_step - len(flight), 0)
        admit(flight, *range(handed_in, handed_in + new))
        handed_in += new
        for group in flight.waiting:
            group.first_weight_version = version
            engines.work[group] = []
        choose(flight, version, per_step=per_step)
        while flight.num_selected < per_step:
            assert engines.work
            engines.run([speed + 1 for speed in data.draw(speeds)], version, flight)
            choose(flight, version, per_step=per_step)
        taken = flight.pop_selected()
        age = token_staleness(taken, version)
        assert age.min() >= 0 and age.max() <= max_staleness
        consumed += indices(taken)
        for _ in range(data.draw(st.integers(0, 2))):  # generation goes on during the update
            engines.run(data.draw(speeds), version, flight)
    complete = flight.select_ready(
        flight.num_finished, 5, per_step=len(flight) + 1, room=0
    )  # all that a refill would find
    in_flight = {group.prompt.index for group in [*complete, *engines.work]}
    assert len(consumed) == len(set(consumed))
    assert set(consumed) | in_flight == set(range(handed_in)) and not set(consumed) & in_flight
    assert len(flight) == max_staleness * per_step


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_group_that_never_finishes_does_not_block_steps(max_staleness: int) -> None:
    flight, engines = InFlight(max_staleness), Engines()
    num_begun = 0
    for version in range(8):
        for group in flight.requeue_stale(version):
            del engines.work[group]
        admit(flight, *([0, 1] if version == 0 else [version + 1]))
        for group in flight.waiting:
            group.first_weight_version = version
            engines.work[group] = []
            num_begun += group.prompt.index == 0
        engines.run([0 if group.prompt.index == 0 else 4 for group in engines.work], version, flight)
        assert choose(flight, version, per_step=1) == [version + 1]
        flight.pop_selected()
    assert num_begun == -(-8 // (max_staleness + 1))  # it begins again whenever it has grown too old
