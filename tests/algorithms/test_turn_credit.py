"""Algorithms whose turns have a credit of their own: divergence by turn, whitening, and what is refused."""

import math
import statistics

import pytest
import torch
from random_trajectories import make_trajectory

from rlightning.algorithms import DAPO, GRPO, RLOO, REINFORCEPlusPlus
from rlightning.types import RolloutBatch


def make_batch() -> RolloutBatch:
    """One group: turns of two and one token, rewarded with 1 and 2; and a turn of three tokens, rewarded with 1."""
    batch = RolloutBatch.pack([[make_trajectory(0, [2, 1], [1.0, 2.0]), make_trajectory(0, [3])]])
    batch.rewards = torch.tensor([3.0, 1.0], dtype=torch.float64)
    batch.ref_logprobs = batch.rollout_logprobs - 0.1
    return batch


def test_each_turn_is_charged_for_its_own_divergence(model_folder: str) -> None:
    batch = make_batch()
    module = RLOO(model_folder, kl_coef=1.0, turn_discount=0.5)
    assert batch.rewards is not None and torch.equal(module.penalize_rewards(batch), batch.rewards)
    # 0.1 a token: rewards 1 - 0.2, 2 - 0.1 and 1 - 0.3; returns 0.8 + 1.9 / 2, 1.9 and 0.7.
    first, second, other = 0.8 + 0.95, 1.9, 0.7
    advantages = module.compute_advantages(batch)[batch.is_sampled].tolist()
    expected = [first - other] * 2 + [second - other] + [other - (first + second) / 2] * 3
    assert advantages == pytest.approx(expected, abs=1e-6)


def test_reinforce_plus_plus_whitens_returns_of_turns(model_folder: str) -> None:
    batch = make_batch()
    module = REINFORCEPlusPlus(model_folder, kl_coef=0.5, turn_discount=0.5)
    # Returns of turns 1 + 2 / 2, 2 and 1, less 0.05 for each token from its own on in its sequence.
    values = [2 - 0.15, 2 - 0.1, 2 - 0.05, 1 - 0.15, 1 - 0.1, 1 - 0.05]
    mean, std = statistics.fmean(values), statistics.pstdev(values)
    advantages = module.compute_advantages(batch)[batch.is_sampled].tolist()
    assert advantages == pytest.approx([(value - mean) / std for value in values], abs=1e-5)


def test_dapo_keeps_its_penalty_with_turns(model_folder: str) -> None:
    """The penalty for a completion's length belongs to the trajectory's last turn."""
    trajectories = [make_trajectory(0, [2, 6], [1.0, 0.0]), make_trajectory(0, [1, 1], [1.0, 0.0])]
    for one in trajectories:
        one.reward = 1.0
    batch = RolloutBatch.pack([trajectories])
    module = DAPO(model_folder, overlong_cache=4, turn_discount=1.0, turn_baseline="turn")
    module.sampling = module.sampling.__class__(max_new_tokens=10)
    batch.rewards = module.compute_rewards(batch)
    assert batch.rewards.tolist() == [1 - 0.5, 1.0] and module.keep_sequences(batch).tolist() == [False, False]
    advantage = 0.25 / (math.sqrt(2 * 0.25**2) + 1e-6)
    advantages = module.compute_advantages(batch)[batch.is_sampled].tolist()
    assert advantages == pytest.approx([-advantage] * 8 + [advantage] * 2, abs=1e-6)


def test_trajectory_alone_in_its_group_is_dropped(model_folder: str) -> None:
    batch = RolloutBatch.pack([[make_trajectory(0, [1])], [make_trajectory(1, [1]), make_trajectory(1, [2])]])
    batch.rewards = torch.tensor([1.0, 0.0, 0.0])
    assert GRPO(model_folder).keep_sequences(batch).tolist() == [False, True, True]
    assert REINFORCEPlusPlus(model_folder).keep_sequences(batch).all()
