import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlightning.module.packing import split_microbatches, split_minibatches

LENGTHS = st.lists(st.integers(1, 100), max_size=60)


@pytest.mark.long
@settings(deadline=None, max_examples=200)
@given(LENGTHS, st.integers(1, 300))
def test_microbatches(lengths: list[int], max_tokens: int) -> None:
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


def test_microbatches_by_hand() -> None:
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
def test_minibatches(num_groups: int, num_minibatches: int, seed: int) -> None:
    parts = split_minibatches(num_groups, num_minibatches, torch.Generator().manual_seed(seed))
    assert sorted(group for part in parts for group in part) == list(range(num_groups))
    assert len(parts) == min(num_minibatches, num_groups)
    if parts:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_minibatches_follow_from_the_generator() -> None:
    deals = [split_minibatches(16, 4, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert deals[0] == deals[1] != deals[2]
    generator = torch.Generator().manual_seed(0)
    assert split_minibatches(16, 4, generator) != split_minibatches(16, 4, generator)


def test_one_minibatch_keeps_the_order() -> None:
    assert split_minibatches(3, 1, torch.Generator()) == [[0, 1, 2]]
    assert split_minibatches(0, 2, torch.Generator()) == []
