"""Groups find their ranks; between real processes they do in test_module_ranks.py."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharded_net import run_ranks
from tiny import make_batch, make_completion

from rlightning.module.batching import (
    assign_groups,
    assign_minibatches,
    balance,
    reassign_groups,
    rebalance,
    split_microbatches,
)
from rlightning.parallel.collectives import global_rank
from rlightning.types import Prompt, RolloutBatch, axis, single_turns


def test_largest_groups_go_first_to_least_loaded_rank() -> None:
    assert assign_groups([5, 9, 4, 6], [[0, 1, 2, 3]], 2) == [1, 0, 0, 1]  # 9 | 6 | 6 + 5 | 9 + 4


def test_minibatches_are_balanced_separately_without_empty_ranks() -> None:
    # One group a minibatch: a rank that has nothing yet gets it.
    assert assign_groups([7, 7, 7], [[0], [1], [2]], 3) == [0, 1, 2]
    assert assign_groups([9, 1, 8, 2], [[0, 1], [2, 3]], 2) == [0, 1, 1, 0]


@pytest.mark.long
@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 100), max_size=40), st.integers(1, 8))
def test_ranks_differ_by_one_group_at_most(tokens: list[int], num_ranks: int) -> None:
    owner = assign_groups(tokens, [list(range(len(tokens)))], num_ranks)
    loads = [sum(t for t, o in zip(tokens, owner, strict=True) if o == rank) for rank in range(num_ranks)]
    assert max(loads) - min(loads) <= max(tokens, default=0)
    assert len(set(owner)) == min(num_ranks, len(tokens))


def test_single_process_keeps_batch_and_renumbers_groups() -> None:
    batch = make_batch([[[1, 0], [2, 0]], [[3, 0]], [[4, 5, 0]]])
    batch = batch.select([0, 1, 3])  # group 1 has been dropped
    batch.rewards = torch.tensor([1.0, 2.0, 3.0])
    shared = balance(batch)
    assert shared.group_ids.tolist() == [0, 0, 1]
    assert shared.token_ids.tolist() == batch.token_ids.tolist()
    assert shared.rewards is not None and shared.rewards.tolist() == [1.0, 2.0, 3.0]


def test_an_empty_batch_stays_one() -> None:
    batch = make_batch([[[1, 0]]]).select([])
    shared = balance(batch)
    assert shared.num_sequences == shared.num_tokens == 0


LENGTHS = st.lists(st.integers(1, 100), max_size=60)


@pytest.mark.long
@settings(deadline=None, max_examples=200)
@given(LENGTHS, st.integers(1, 300))
def test_microbatches_hold_each_sequence_once_within_limit(lengths: list[int], max_tokens: int) -> None:
    parts = split_microbatches(lengths, max_tokens)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in parts)
    sums = [sum(lengths[i] for i in part) for part in parts]
    assert all(total <= max_tokens or len(part) == 1 for total, part in zip(sums, parts, strict=True))
    assert all(parts)
    # Any two together are too large, or as few as their tokens ask for were made.
    fewest = -(-sum(lengths) // max_tokens)
    if len(parts) > max(fewest, 1):
        assert 2 * sum(sums) > (len(parts) - 1) * max_tokens


@settings(deadline=None, max_examples=200)
@given(LENGTHS.filter(bool))
def test_microbatches_are_balanced(lengths: list[int]) -> None:
    parts = split_microbatches(lengths, max(max(lengths), 10 * max(lengths)))
    sums = [sum(lengths[i] for i in part) for part in parts]
    # Within one sequence: the last that came into the fullest went there when it was the emptiest.
    assert max(sums) - min(sums) <= max(lengths)


@pytest.mark.long
@settings(deadline=None, max_examples=200)
@given(LENGTHS, st.integers(1, 300))
def test_microbatches_by_cost_keep_to_the_tokens(lengths: list[int], max_tokens: int) -> None:
    parts = split_microbatches(lengths, max_tokens, costs=[length + length**2 / 10 for length in lengths])
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in part) <= max_tokens or len(part) == 1 for part in parts)
    if len(parts) > max(-(-sum(lengths) // max_tokens), 1):  # any two together are too large
        assert 2 * sum(lengths) > (len(parts) - 1) * max_tokens


@pytest.mark.long
@settings(deadline=None, max_examples=200)
@given(LENGTHS.filter(bool), st.integers(2, 5))
def test_microbatches_of_equal_cost(lengths: list[int], number: int) -> None:
    costs = [length + length**2 / 10 for length in lengths]
    parts = split_microbatches(lengths, sum(lengths), costs=costs, at_least=number)
    sums = [sum(costs[i] for i in part) for part in parts]
    assert max(sums) - min(sums) <= max(costs) + 1e-9


def test_microbatches_equal_hand_made_ones() -> None:
    assert split_microbatches([5, 4, 3, 2], 7) == [[0, 3], [1, 2]]
    assert split_microbatches([5, 5, 5], 8) == [[0], [1], [2]]
    assert split_microbatches([9, 1], 4) == [[0], [1]]
    assert split_microbatches([], 4) == []
    assert split_microbatches([4, 2, 2, 1, 1], 7) == [[0, 3], [1, 2, 4]]
    # by squares the 4 costs more than all the others, which have room beside each other
    assert split_microbatches([4, 2, 2, 1, 1], 7, costs=[16, 4, 4, 1, 1]) == [[0], [1, 2, 3, 4]]
    # the last 2 has no room where it would be cheaper
    assert split_microbatches([4, 2, 2, 2, 2], 6, costs=[16, 4, 4, 4, 4]) == [[0, 4], [1, 2, 3]]


@settings(deadline=None, max_examples=200)
@given(LENGTHS, st.integers(1, 300), st.integers(1, 70))
def test_as_many_microbatches_as_another_rank_makes(lengths: list[int], max_tokens: int, at_least: int) -> None:
    parts = split_microbatches(lengths, max_tokens, at_least=at_least)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    fewest = len(split_microbatches(lengths, max_tokens))
    assert len(parts) == max(fewest, min(at_least, len(lengths)))


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 60), st.integers(1, 8), st.integers(0, 3))
def test_minibatches_hold_each_group_once_evenly(num_groups: int, num_minibatches: int, seed: int) -> None:
    for parts in assign_minibatches(num_groups, num_minibatches, seed, num_epochs=2):
        assert sorted(group for part in parts for group in part) == list(range(num_groups))
        assert len(parts) == min(num_minibatches, num_groups)
        if parts:
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_minibatches_follow_from_seed_and_epoch() -> None:
    deals = [assign_minibatches(16, 4, seed, num_epochs=2) for seed in (0, 0, 1)]
    assert deals[0] == deals[1] != deals[2]
    assert deals[0][0] != deals[0][1]


def test_one_minibatch_keeps_the_order() -> None:
    assert assign_minibatches(3, 1, seed=0) == [[[0, 1, 2]]]
    assert assign_minibatches(0, 2, seed=0) == [[]]


def test_groups_that_cost_nothing_stay_where_they_are() -> None:
    assert reassign_groups([0, 0, 0, 0], [[0, 1, 2, 3]], [0, 1, 0, 1], 2) == [0, 1, 0, 1]
    # 6 + 4 | nothing becomes 6 | 4, and the others do not follow
    assert reassign_groups([6, 4, 0, 0], [[0, 1, 2, 3]], [0, 0, 1, 1], 2) == [0, 1, 1, 1]


@dataclass(slots=True)
class NotedBatch(RolloutBatch):
    noted: torch.Tensor | None = field(default=None, metadata=axis("G"))


def move_expensive(folder: Path) -> dict[str, list[Any]]:
    """Balance groups of equal cost over two ranks, then again when all that costs is on the first."""
    start = 10 * global_rank()
    batch = NotedBatch.concatenate([pack(start + number) for number in range(3)])
    batch = balance(batch)
    first = batch.group_ids.tolist()
    batch.noted = torch.unique(batch.group_ids) * 7
    costs = batch.lengths.double() * (global_rank() == 0)
    kept = rebalance(batch, batch.lengths.double(), num_minibatches=1, seed=0)
    moved = rebalance(batch, costs, num_minibatches=1, seed=0)
    assert moved.noted is not None
    return {
        "first": first,
        "kept": kept.group_ids.tolist(),
        "moved": moved.group_ids.tolist(),
        "noted": moved.noted.tolist(),
        "tokens": moved.token_ids.tolist(),
    }


def pack(token: int) -> NotedBatch:
    prompt = Prompt(0, "", [token], {})
    return NotedBatch.pack(single_turns([prompt], [[make_completion([token])] * 2]))


@pytest.mark.processes
def test_groups_move_once_more_when_costs_have_changed(tmp_path: Path) -> None:
    ranks = run_ranks(move_expensive, 2, tmp_path)
    for rank in ranks:
        assert rank["kept"] == rank["first"]
        assert rank["moved"] == sorted(rank["moved"])
        groups = sorted(set(rank["moved"]))
        assert rank["noted"] == [7 * group for group in groups]
        assert rank["tokens"] == [token for group in groups for token in [group % 3 + 10 * (group // 3)] * 4]
    owners = [set(rank["moved"]) for rank in ranks]
    assert owners[0] | owners[1] == set(range(6)) and not owners[0] & owners[1]
    shared = [len(set(ranks[0]["first"]) & own) for own in owners]
    assert sorted(shared) == [1, 2]  # of three that cost
