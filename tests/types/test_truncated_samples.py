"""Supports of truncated distributions: from samples to a batch's tensor, through cuts, joins and checkpoints."""

import pickle
from dataclasses import replace

import pytest
from test_trajectory import two_branches

from rlightning.errors import RunError
from rlightning.types import Branch, Prompt, RolloutBatch, Sample, Trajectory, Turn
from rlightning.types.supports import Supports
from rlightning.types.trajectory import from_plain, to_plain

NONE = [-1, -1, -1]


def truncated() -> Trajectory:
    """Of the turns 3 4 and 7 8: tokens 4 and 8 were drawn from 4 9 and 8 2 3, 7 was the only one, 3 any."""
    trajectory = two_branches()
    first, second = trajectory.samples
    first.supports, second.supports = Supports([4, 9], [0, 2]), Supports([7, 8, 2, 3], [1, 3])
    return trajectory


def single(supports: Supports | None = None) -> Trajectory:
    sample = Sample([5, 0], [-3.0, -1.0], [2, 2], "5", "stop", supports)
    return Trajectory.single_turn(Prompt(1, "9", [9], {}), sample)


def test_supports_are_at_the_tokens_that_were_drawn() -> None:
    batch = RolloutBatch.pack([[truncated()], [single()]])
    # tokens: 1 2 3 4 5, 1 2 6 4 7 8, 9 5 0
    rows = [NONE] * 3 + [[4, 9, -1]] + [NONE] * 5 + [[7, -1, -1], [8, 2, 3]] + [NONE] * 3
    assert batch.supports is not None and batch.supports.tolist() == rows
    assert RolloutBatch.pack([[two_branches()], [single()]]).supports is None
    assert RolloutBatch.pack([[single(Supports([], [0, 0]))]]).supports is not None
    again = RolloutBatch.pack([batch.unpack()])
    assert again.supports is not None and again.supports.tolist() == rows


def test_supports_follow_turns_that_return_to_an_earlier_branch() -> None:
    """The third turn goes on after the first, in the same branch; the second has a branch of its own."""
    samples = [Sample([i], [-1.0], [0], "", "stop", Supports([i, 10 + i], [2])) for i in (1, 2, 3)]
    one, other = Branch(), Branch("history_edited")
    for branch in (one, other):
        branch.append([9])
    for branch, sample, turn in ((one, samples[0], 0), (other, samples[1], 1), (one, samples[2], 2)):
        branch.append_sample(sample, turn)
    turns = tuple(Turn({"role": "assistant", "content": ""}, sample) for sample in samples)
    batch = RolloutBatch.pack([[Trajectory(Prompt(0, "", [9], {}), (one, other), turns)]])
    assert batch.token_ids.tolist() == [9, 1, 3, 9, 2]
    assert batch.supports is not None and batch.supports.tolist() == [[-1, -1], [1, 11], [3, 13], [-1, -1], [2, 12]]


@pytest.mark.parametrize(
    ("supports", "message"),
    [
        (Supports([5, 6], [2]), r"^A sample of 2 tokens has supports of 1 tokens, whose sizes add up to 2"),
        (Supports([5, 6], [2, 1]), r"sizes add up to 3, and 2 token ids"),
        (Supports([5, 6, 7], [2, 1]), r"^Token 1 of a sample, 0, is in its support 0 times"),
        (Supports([5, 5, 0], [2, 1]), r"^Token 0 of a sample, 5, is in its support 2 times"),
    ],
)
def test_supports_of_other_tokens_are_refused(supports: Supports, message: str) -> None:
    with pytest.raises(RunError, match=message):
        RolloutBatch.pack([[single(supports)]])


def test_supports_of_selected_sequences_go_along() -> None:
    batch = RolloutBatch.pack([[truncated()], [single(Supports([5, 6, 0], [2, 1]))]])
    part = batch.select([2, 1], axis="N")
    assert part.supports is not None
    assert part.supports.tolist() == [NONE, [5, 6, -1], [0, -1, -1], *[NONE] * 4, [7, -1, -1], [8, 2, 3]]
    padding = batch.padding()
    assert padding.supports is not None and padding.supports.tolist() == [NONE]


@pytest.mark.parametrize("other", [None, Supports([5, 6, 0], [2, 1])])
def test_batches_with_narrower_or_no_supports_are_joined(other: Supports | None) -> None:
    parts = [RolloutBatch.pack([[one]]) for one in (single(other), truncated(), two_branches())]
    joined = RolloutBatch.concatenate(parts)
    at_once = RolloutBatch.pack([[single(other)], [truncated()], [two_branches()]])
    assert joined.supports is not None and at_once.supports is not None
    assert joined.supports.tolist() == at_once.supports.tolist()
    assert parts[0].supports is None or parts[0].supports.shape[1] == 2  # which is as it was
    joined.check()


def test_saved_trajectories_keep_supports() -> None:
    trajectory = truncated()
    saved = pickle.loads(pickle.dumps(to_plain(trajectory)))
    loaded = from_plain(saved, trajectory.prompt)
    assert [one.supports for one in loaded.samples] == [one.supports for one in trajectory.samples]
    assert loaded == trajectory and loaded != replace(trajectory, turns=two_branches().turns)
    for _, sample in saved["turns"]:  # as of a checkpoint from before there were any
        if sample is not None:
            del sample["supports"]
    assert from_plain(saved, trajectory.prompt).samples == two_branches().samples
