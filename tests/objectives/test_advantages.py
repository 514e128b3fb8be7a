import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from rlightning.objectives import (
    group_advantages,
    has_signal,
    leave_one_out,
    overlong_penalty,
    token_returns,
    whiten,
)


def test_group_advantages_by_hand() -> None:
    rewards = torch.tensor([1.0, 5.0, 0.0, 7.0, 1.0])
    groups = torch.tensor([8, 3, 8, 3, 8])
    # Group 8: rewards 1, 0, 1, mean 2/3; squares 1/9, 4/9, 1/9, variance (6/9) / 2 = 1/3. Group 3: 5, 7, mean 6.
    centred = torch.tensor([1 / 3, -1.0, -2 / 3, 1.0, 1 / 3])
    torch.testing.assert_close(group_advantages(rewards, groups, scale_by_std=False), centred)
    std = torch.tensor([math.sqrt(1 / 3), math.sqrt(2.0), math.sqrt(1 / 3), math.sqrt(2.0), math.sqrt(1 / 3)])
    torch.testing.assert_close(group_advantages(rewards, groups), centred / (std + 1e-6))


@pytest.mark.parametrize("advantages", [group_advantages, leave_one_out])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -0.7])
def test_equal_rewards_give_exact_zeros(advantages: Callable[[Tensor, Tensor], Tensor], reward: float) -> None:
    # In float32 the mean of seven times 0.1 is not 0.1.
    result = advantages(torch.full((7,), reward), torch.zeros(7, dtype=torch.int64))
    assert torch.equal(result, torch.zeros(7))


_SUMS_OF_99_9 = [99.9, 33.3 + 66.6, 100.2 - 0.3, 0.1 + 0.2 + 99.6]
"""Some of which are not 99.9 in float64, and none of which is in float32."""


@pytest.mark.parametrize("advantages", [group_advantages, leave_one_out])
def test_advantages_of_equal_sums_are_exact_zeros(advantages: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert len(set(_SUMS_OF_99_9)) > 1
    group = torch.zeros(4, dtype=torch.int64)
    rewards = torch.tensor(_SUMS_OF_99_9, dtype=torch.float64)
    assert torch.equal(advantages(rewards, group), torch.zeros(4))
    # One unit in the last place of float32, as a reward function of one's own may compute.
    narrow = torch.tensor([99.9, 99.9, 99.9 + 8e-6, 99.9])
    assert narrow.unique().numel() == 2
    assert torch.equal(advantages(narrow, group), torch.zeros(4))


def test_advantages_keep_small_differences_of_rewards() -> None:
    rewards = torch.tensor([1.0, 1.0 + 1e-5], dtype=torch.float64)
    group = torch.zeros(2, dtype=torch.int64)
    torch.testing.assert_close(leave_one_out(rewards, group), torch.tensor([-1e-5, 1e-5]))
    assert has_signal(rewards, group).all()


def test_has_signal_of_equal_sums_is_false() -> None:
    group = torch.zeros(4, dtype=torch.int64)
    assert not has_signal(torch.tensor(_SUMS_OF_99_9, dtype=torch.float64), group).any()
    assert not has_signal(torch.tensor([99.9, 99.9 + 8e-6, 99.9, 99.9]), group).any()


def test_leave_one_out_by_hand() -> None:
    rewards = torch.tensor([1.0, 0.0, 4.0, 9.0])
    groups = torch.tensor([0, 0, 0, 1])
    # 1 - (0 + 4) / 2; 0 - (1 + 4) / 2; 4 - (1 + 0) / 2; alone.
    torch.testing.assert_close(leave_one_out(rewards, groups), torch.tensor([-1.0, -2.5, 3.5, 0.0]))


def test_whiten_by_hand_leaves_out_prompts() -> None:
    values = torch.tensor([99.0, 1.0, 2.0, -99.0, 6.0])
    mask = torch.tensor([False, True, True, False, True])
    # Mean (1 + 2 + 6) / 3 = 3; deviations -2, -1, 3; variance (4 + 1 + 9) / 3 = 14/3.
    std = math.sqrt(14 / 3)
    expected = torch.tensor([0.0, -2 / std, -1 / std, 0.0, 3 / std])
    torch.testing.assert_close(whiten(values, mask), expected)


def test_whiten_is_global_over_ranks() -> None:
    values, mask = torch.tensor([1.0, 2.0, 6.0, 5.0]), torch.ones(4, dtype=torch.bool)
    # The other rank holds one token, of value 6: what it adds is (sum, count), then the sum of squared deviations
    # from the global mean, (1 + 2 + 6 + 5 + 6) / 5 = 4.
    others = iter([torch.tensor([6.0, 1.0]), torch.tensor(4.0)])
    std = math.sqrt((9 + 4 + 4 + 1 + 4) / 5)
    result = whiten(values, mask, all_sum=lambda tensor: tensor + next(others))
    torch.testing.assert_close(result, torch.tensor([-3 / std, -2 / std, 2 / std, 1 / std]))


def test_whiten_gives_exact_zeros_for_equal_values() -> None:
    mask = torch.ones(1001, dtype=torch.bool)
    assert torch.equal(whiten(torch.full((1001,), 0.1), mask), torch.zeros(1001))


def test_whiten_reduces_bfloat16_in_float32() -> None:
    # In bfloat16 a running sum of ones stops at 256.
    values = torch.cat([torch.ones(1000), torch.zeros(1000)]).bfloat16()
    result = whiten(values, torch.ones(2000, dtype=torch.bool))
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, torch.cat([torch.ones(1000), -torch.ones(1000)]))


@pytest.mark.parametrize("discount", [1.0, 0.5])
def test_token_returns_by_hand(discount: float) -> None:
    rewards = torch.tensor([1.0, 2.0, 4.0, 8.0, 3.0, 5.0])
    cu_seqlens = torch.tensor([0, 4, 6])
    d = discount
    expected = [1 + 2 * d + 4 * d**2 + 8 * d**3, 2 + 4 * d + 8 * d**2, 4 + 8 * d, 8.0, 3 + 5 * d, 5.0]
    result = token_returns(rewards, cu_seqlens, discount=discount)
    torch.testing.assert_close(result, torch.tensor(expected))


def test_token_returns_of_long_sequences_match_the_recurrence() -> None:
    lengths = [1, 37, 0, 64, 5]
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    rewards = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(0))
    expected = torch.zeros_like(rewards)
    for start, end in pairwise(cu_seqlens.tolist()):
        following = 0.0
        for t in reversed(range(start, end)):
            following = float(rewards[t]) + 0.9 * following
            expected[t] = following
    torch.testing.assert_close(token_returns(rewards, cu_seqlens, discount=0.9), expected)


def test_has_signal_where_rewards_of_group_differ() -> None:
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.3, 0.3 + 1e-8, 1.0])
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 3])
    assert has_signal(rewards, groups).tolist() == [False, False, True, True, False, False, False]


def test_overlong_penalty_by_hand() -> None:
    # A limit of 20480 with a slope of 4096: free up to 16384; at 17408 a quarter of the slope is used up.
    lengths = torch.tensor([0, 16384, 17408, 18432, 20480, 30000])
    expected = torch.tensor([0.0, 0.0, -0.25, -0.5, -1.0, -1.0])
    torch.testing.assert_close(overlong_penalty(lengths, 20480, 4096), expected)
