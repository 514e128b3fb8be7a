import contextlib

import pytest
import torch
from tiny import in_this_process, make_batch

from rlightning.algorithms import DAPO
from rlightning.errors import ConfigError
from rlightning.module.metrics import rollout_metrics
from rlightning.rewards import RewardFunction
from rlightning.rollout import Sampling
from rlightning.types import RolloutBatch


@in_this_process
async def is_even(completion: str) -> float:
    """A reward of 1 for an even number of characters."""
    return float(len(completion) % 2 == 0)


def batch_of(lengths: list[list[int]]) -> RolloutBatch:
    """Completions of so many tokens, each a character."""
    return make_batch([[[1] * n for n in group] for group in lengths], prompt=[2])


def reward(model_folder: str, batch: RolloutBatch, overlong_cache: int | None = None) -> DAPO:
    """A module for completions of up to 20 tokens, which has set the batch's rewards."""
    module = DAPO(model_folder, rewards=[RewardFunction(is_even)], overlong_cache=overlong_cache)
    module.sampling = Sampling(max_new_tokens=20)
    with contextlib.closing(module):
        batch.rewards = module.compute_rewards(batch)
    return module


def test_overlong_completions_are_punished(model_folder: str) -> None:
    batch = batch_of([[4, 16, 18, 20], [17, 19, 2, 4]])
    # The last fifth of 20 tokens is 4: nothing up to 16, then a quarter a token.
    penalties = [0.0, 0.0, -0.5, -1.0, -0.25, -0.75, 0.0, 0.0]
    evens = [1, 1, 1, 1, 0, 0, 1, 1]
    reward(model_folder, batch)
    assert batch.rewards is not None and batch.rewards.tolist() == pytest.approx(
        [e + p for e, p in zip(evens, penalties, strict=True)]
    )
    assert batch.scores["overlong"].tolist() == pytest.approx(penalties)


def test_penalty_is_by_the_prompts_own_limit(model_folder: str) -> None:
    batch = batch_of([[8, 9, 10], [3, 4], [18, 20]])
    for one in batch.trajectories:
        one.prompt = one.prompt._replace(max_new_tokens=[10, 4, None][one.prompt.index])
    # A fifth of 10 tokens is 2, of 20 it is 4; a limit of 4 tokens has no fifth.
    for cache, expected in ((None, [0, -0.5, -1, 0, 0, -0.5, -1]), (8, [-0.75, -0.875, -1, -0.75, -1, -0.75, -1])):
        reward(model_folder, batch, cache)
        assert batch.scores["overlong"].tolist() == expected


def test_groups_are_kept_by_rewards_before_penalty(model_folder: str) -> None:
    # All right, of different lengths; right and wrong; all wrong.
    batch = batch_of([[4, 18, 20], [4, 19, 3], [3, 17, 19]])
    module = reward(model_folder, batch)
    assert module.keep_sequences(batch).tolist() == [False] * 3 + [True] * 3 + [False] * 3
    assert module.compared_rewards(batch).tolist() == pytest.approx([1, 1, 1, 1, 0, 0, 0, 0, 0])
    metrics = rollout_metrics(batch, torch.clone, torch.clone, compared=module.compared_rewards(batch))
    assert metrics["reward/no_signal"] == pytest.approx(2 / 3)


def test_no_cache_is_no_penalty(model_folder: str) -> None:
    batch = batch_of([[20, 18]])
    module = reward(model_folder, batch, overlong_cache=0)
    assert batch.rewards is not None and batch.rewards.tolist() == [1.0, 1.0]
    assert "overlong" not in batch.scores
    assert not module.keep_sequences(batch).any()


def test_a_cache_longer_than_the_limit_is_refused(model_folder: str) -> None:
    with pytest.raises(ConfigError, match=r"overlong_cache=21 is longer than rollout\.max_new_tokens=20"):
        reward(model_folder, batch_of([[2]]), overlong_cache=21)
