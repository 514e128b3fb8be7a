"""Supports of truncated distributions: from samples to a batch's tensor, through cuts, joins and checkpoints."""

import pickle
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trajectories import random_groups
from test_trajectory import two_branches
from torch import Tensor

from rlightning.errors import RunError
from rlightning.types import Branch, Prompt, RolloutBatch, Sample, Trajectory, Turn, axis
from rlightning.types.supports import Supports
from rlightning.types.trajectory import from_plain, to_plain

NONE = [-1, -1, -1]
RANDOM = st.integers(0, 2**32).map(random.Random)


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
    # of 1 2 3 4 5, 1 2 6 4 7 8, 9 5 0 the tokens 3 4, 7 8 and 5 0
    rows = [NONE, [4, 9, -1], [7, -1, -1], [8, 2, 3], NONE, NONE]
    assert batch.supports is not None and batch.supports.tolist() == rows
    assert RolloutBatch.pack([[two_branches()], [single()]]).supports is None
    assert RolloutBatch.pack([[single(Supports([], [0, 0]))]]).supports is not None
    again = RolloutBatch.pack([batch.unpack()])
    assert again.supports is not None and again.supports.tolist() == rows


def test_supports_follow_turns_back_to_earlier_branch() -> None:
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
    assert batch.supports is not None and batch.supports.tolist() == [[1, 11], [3, 13], [2, 12]]
    alone = batch.select([1], axis="N").to("cpu")
    assert alone.supports is not None and alone.supports.tolist() == [[2, 12]]


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


def test_sample_with_supports_in_two_branches_is_refused() -> None:
    sample = Sample([5, 6], [-1.0, -1.0], [0, 0], "", "stop", Supports([5, 6], [1, 1]))
    branches = (Branch(), Branch("retokenized"))
    for branch, token in zip(branches, sample.token_ids, strict=True):
        branch.append([9])
        branch.append_sample(Sample([token], [-1.0], [0], "", "stop"), 0)
    trajectory = Trajectory(Prompt(0, "", [9], {}), branches, (Turn({"role": "assistant", "content": ""}, sample),))
    with pytest.raises(ValueError, match=r"^2 tokens of the branches have a weight version, and 4 tokens of their"):
        RolloutBatch.pack([[trajectory]])
    sample.supports = None
    assert RolloutBatch.pack([[trajectory]]).supports is None


def test_supports_of_selected_sequences_go_along() -> None:
    batch = RolloutBatch.pack([[truncated()], [single(Supports([5, 6, 0], [2, 1]))]])
    part = batch.select([2, 1], axis="N")
    assert part.supports is not None
    assert part.supports.tolist() == [[5, 6, -1], [0, -1, -1], [7, -1, -1], [8, 2, 3]]
    narrow = batch.select([2], axis="N").supports  # no wider than its own
    assert narrow is not None and narrow.tolist() == [[5, 6], [0, -1]]
    assert batch.padding().supports is None


@pytest.mark.parametrize("other", [None, Supports([5, 6, 0], [2, 1])])
def test_batches_with_narrower_or_no_supports_are_joined(other: Supports | None) -> None:
    parts = [RolloutBatch.pack([[one]]) for one in (single(other), truncated(), two_branches())]
    joined = RolloutBatch.concatenate(parts)
    at_once = RolloutBatch.pack([[single(other)], [truncated()], [two_branches()]])
    assert joined.supports is not None and at_once.supports is not None
    assert joined.supports.tolist() == at_once.supports.tolist()
    joined.check()


@dataclass(slots=True)
class PlacedBatch(RolloutBatch):
    """Knows each token's place in the whole batch."""

    place: Tensor | None = field(default=None, metadata=axis("T"))


def random_supports(draw: random.Random, sample: Sample) -> list[list[int]]:
    """Give a sample supports, or none; return that of each of its tokens."""
    if draw.random() < 0.3:
        sample.supports = None
        return [[] for _ in sample.token_ids]
    widest = draw.choice((1, 3, 20))
    rows = [[token, *draw.sample(range(100, 140), widest)][: draw.randrange(widest + 2)] for token in sample.token_ids]
    sample.supports = Supports([token for row in rows for token in row], map(len, rows))
    return rows


def supports_by_place(draw: random.Random, trajectories: list[Trajectory]) -> list[list[int]]:
    """Give all samples random supports; return that of each token of the batch, in the order of the branches."""
    found = []
    for one in trajectories:
        rows = {place: random_supports(draw, turn.sample) for place, turn in enumerate(one.turns) if turn.sample}
        for branch in one.branches:
            num_seen = Counter[int]()
            for turn, is_sampled in zip(branch.turns, branch.is_sampled, strict=True):
                found.append(rows[turn][num_seen[turn]] if is_sampled else [])
                num_seen[turn] += is_sampled
    return found


@settings(max_examples=60, deadline=None)
@given(RANDOM)
def test_cut_order_and_ranks_keep_token_supports(draw: random.Random) -> None:
    groups = random_groups(draw)
    expected = supports_by_place(draw, [one for group in groups for one in group])
    batch = PlacedBatch.pack(groups)
    batch.place = torch.arange(batch.num_tokens)
    # Whole trajectories go to ranks, in any order, and meet others there.
    order = draw.sample(range(batch.num_trajectories), batch.num_trajectories)
    bounds = [0, *sorted(draw.randint(0, len(order)) for _ in range(3)), len(order)]
    sent = [pickle.loads(pickle.dumps(batch.select(order[start:end]))) for start, end in pairwise(bounds)]
    ranks = [PlacedBatch.concatenate(sent[:2]), PlacedBatch.concatenate(sent[2:])]
    num_found = 0
    for rank in ranks:
        rank.is_sampled &= torch.tensor([draw.random() < 0.9 for _ in range(rank.num_tokens)], dtype=torch.bool)
        sequences = draw.sample(range(rank.num_sequences), rank.num_sequences)
        bounds = [0, *sorted(draw.randint(0, len(sequences)) for _ in range(2)), len(sequences)]
        for part in (rank.select(sequences[start:end], axis="N").to("cpu") for start, end in pairwise(bounds)):
            assert part.place is not None
            places = part.place[part.sampled_index].tolist()
            rows = [[]] * len(places) if part.supports is None else part.supports.tolist()
            assert [[token for token in row if token >= 0] for row in rows] == [expected[place] for place in places]
            num_found += len(places)
    assert num_found == sum(int(rank.is_sampled.sum()) for rank in ranks)


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
