"""Groups find their ranks; between real processes they do in test_module_ranks.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import make_batch

from rlightning.module.batching import assign_groups, balance


def test_largest_groups_go_first_to_least_loaded_rank() -> None:
    assert assign_groups([5, 9, 4, 6], [[0, 1, 2, 3]], 2) == [1, 0, 0, 1]  # 9 | 6 | 6 + 5 | 9 + 4


def test_minibatches_are_balanced_separately_without_empty_ranks() -> None:
    # One group a minibatch: whoever has nothing yet takes it.
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
