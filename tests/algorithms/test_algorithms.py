"""Advantages and losses of each algorithm on the same batch, worked out by hand; and the defaults of its paper."""

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from tiny import make_completion, make_data, make_trainer
from torch import Tensor

from rlightning.algorithms import (
    CISPO,
    DAPO,
    GRPO,
    GSPO,
    RLOO,
    SAPO,
    SFT,
    DrGRPO,
    REINFORCEPlusPlus,
    REINFORCEPlusPlusBaseline,
)
from rlightning.errors import ConfigError
from rlightning.module import RLModule
from rlightning.types import Prompt, RolloutBatch, single_turns


def make_batch() -> RolloutBatch:
    """Group 0: rewards 1, 0, 0.5 with 2, 1 and 3 tokens. Group 1: rewards 2 and 2 with 1 and 2 tokens."""
    rewards, groups, lengths = [1.0, 0.0, 0.5, 2.0, 2.0], [0, 0, 0, 1, 1], [2, 1, 3, 1, 2]
    prompts = [Prompt(index=g, text="1", token_ids=[2], columns={}) for g in groups]
    batch = RolloutBatch.pack(single_turns(prompts, [[make_completion([1] * n, [-0.5] * n)] for n in lengths]))
    batch.group_ids = torch.tensor(groups)
    batch.rewards = torch.tensor(rewards)
    return batch


def by_sequence(batch: RolloutBatch, values: Tensor) -> list[list[float]]:
    """Values [T] of the completion tokens, sequence by sequence."""
    owners = batch.to_tokens(torch.arange(batch.num_trajectories))
    return [values[batch.is_sampled & (owners == i)].tolist() for i in range(batch.num_trajectories)]


def repeat(values: list[float]) -> list[list[float]]:
    """A value for each token of each of the batch's completions."""
    return [[v] * n for v, n in zip(values, [2, 1, 3, 1, 2], strict=True)]


def assert_close(actual: list[list[float]], expected: list[list[float]]) -> None:
    assert [len(a) for a in actual] == [len(e) for e in expected]
    for a, e in zip(actual, expected, strict=True):
        assert a == pytest.approx(e, abs=1e-5)


def whitened(values: list[float]) -> list[float]:
    """Return values [T] minus the batch's mean, divided by the standard deviation over the batch's tokens."""
    tokens = [value for sequence in repeat(values) for value in sequence]
    mean, std = statistics.fmean(tokens), statistics.pstdev(tokens)
    return [(value - mean) / std for value in values]


BY_DEVIATION = [1.0, -1.0, 0.0, 0.0, 0.0]
"""Group 0: mean 0.5, sample variance (0.25 + 0.25 + 0) / 2 = 0.25, so 0.5 / 0.5. Group 1 says nothing."""
CENTRED = [0.5, -0.5, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("algorithm", "arguments", "expected"),
    [
        *((algorithm, {}, BY_DEVIATION) for algorithm in (GRPO, DAPO, GSPO, CISPO, SAPO)),
        (DrGRPO, {}, CENTRED),
        (GRPO, {"scale_by_std": False}, CENTRED),
        (RLOO, {}, [0.75, -0.75, 0.0, 0.0, 0.0]),  # 1 - (0 + 0.5) / 2; 0 - (1 + 0.5) / 2; 0.5 - (1 + 0) / 2
        (REINFORCEPlusPlus, {"kl_coef": 0.0}, whitened([1.0, 0.0, 0.5, 2.0, 2.0])),
        (REINFORCEPlusPlusBaseline, {}, whitened(CENTRED)),
    ],
)
def test_advantages_equal_hand_computed_ones(
    algorithm: type[RLModule], arguments: dict[str, Any], expected: list[float], model_folder: str
) -> None:
    batch = make_batch()
    advantages = algorithm(model_folder, **arguments).compute_advantages(batch)
    assert_close(by_sequence(batch, advantages), repeat(expected))


def test_rloo_reward_subtracts_kl_of_whole_completion(model_folder: str) -> None:
    batch = make_batch()
    batch.ref_logprobs = batch.rollout_logprobs - 0.1
    # k1 is 0.1 a token: 0.03 * 0.1 * length is taken off; the sampler's log-probabilities serve, there being no others.
    penalized = RLOO(model_folder).penalize_rewards(batch)
    expected = [1 - 0.006, 0 - 0.003, 0.5 - 0.009, 2 - 0.003, 2 - 0.006]
    assert penalized.tolist() == pytest.approx(expected)


def test_reinforce_plus_plus_charges_tokens_for_later_kl(model_folder: str) -> None:
    batch = make_batch()
    batch.ref_logprobs = batch.rollout_logprobs - 0.1
    module = REINFORCEPlusPlus(model_folder, kl_coef=2.0)
    assert batch.rewards is not None
    assert torch.equal(module.penalize_rewards(batch), batch.rewards)
    # 2 * 0.1 a token, of that token and those after it.
    returns = [[1 - 0.4, 1 - 0.2], [0 - 0.2], [0.5 - 0.6, 0.5 - 0.4, 0.5 - 0.2], [2 - 0.2], [2 - 0.4, 2 - 0.2]]
    flat = [value for sequence in returns for value in sequence]
    mean, std = statistics.fmean(flat), statistics.pstdev(flat)
    expected = [[(value - mean) / std for value in sequence] for sequence in returns]
    assert_close(by_sequence(batch, module.compute_advantages(batch)), expected)


ALGORITHMS = [GRPO, DrGRPO, DAPO, RLOO, REINFORCEPlusPlus, REINFORCEPlusPlusBaseline, GSPO, CISPO, SAPO]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_on_policy_gradient_is_that_of_reinforce(algorithm: type[RLModule], model_folder: str) -> None:
    batch = make_batch()
    module = algorithm(model_folder)
    batch.advantages = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(0))
    batch.old_logprobs = batch.rollout_logprobs
    logprobs = batch.rollout_logprobs.clone().requires_grad_()
    loss, metrics = module.policy_loss(logprobs, batch)
    assert all(value.shape == loss.shape and not value.requires_grad for value in metrics.values())
    gradient = torch.autograd.grad(loss[batch.is_sampled].sum(), logprobs)[0]
    torch.testing.assert_close(gradient, torch.where(batch.is_sampled, -batch.advantages, 0))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_zero_advantages_give_an_exactly_zero_gradient(algorithm: type[RLModule], model_folder: str) -> None:
    batch = make_batch()
    batch.advantages = torch.zeros(batch.num_tokens)
    batch.old_logprobs = batch.rollout_logprobs
    logprobs = (batch.rollout_logprobs + 0.3).requires_grad_()
    loss, _ = algorithm(model_folder).policy_loss(logprobs, batch)
    assert not torch.autograd.grad(loss.sum(), logprobs)[0].any()


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, SFT])
def test_half_precision_as_the_default_changes_nothing(algorithm: type[RLModule], model_folder: str) -> None:
    """With ``trainer.precision=bf16-true`` a step runs under a default dtype of bfloat16."""
    module, batch = algorithm(model_folder), make_batch()
    batch.ref_logprobs, batch.old_logprobs = batch.rollout_logprobs - 0.1, batch.rollout_logprobs
    results = []
    try:
        for dtype in (torch.float32, torch.bfloat16):
            torch.set_default_dtype(dtype)
            batch.advantages = module.compute_advantages(batch)
            loss, metrics = module.policy_loss(batch.rollout_logprobs + 0.3, batch)
            results.append([batch.advantages, loss, *metrics.values()])
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(value.dtype == torch.float32 for value in results[1])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_papers_numbers_decide_who_is_clipped(model_folder: str) -> None:
    batch = make_batch()
    batch.advantages = torch.ones(batch.num_tokens)
    batch.old_logprobs = batch.rollout_logprobs

    def share_clipped(module: RLModule, ratio: float) -> float:
        _, metrics = module.policy_loss(batch.rollout_logprobs + math.log(ratio), batch)
        return metrics["clip_high"][batch.is_sampled].mean().item()

    for make, inside, outside in (
        (GRPO, 1.19, 1.21),
        (DrGRPO, 1.19, 1.21),
        (DAPO, 1.27, 1.29),
        (REINFORCEPlusPlus, 1.19, 1.21),
        (REINFORCEPlusPlusBaseline, 1.19, 1.21),
        (GSPO, 1.0003, 1.0005),
        (CISPO, 4.9, 5.1),
    ):
        assert share_clipped(make(model_folder), inside) == 0.0
        assert share_clipped(make(model_folder), outside) == 1.0


@pytest.mark.parametrize(
    ("algorithm", "defaults"),
    [
        (GRPO, {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0, "kl_estimator": "k3", "kl_placement": "loss"}),
        (GRPO, {"loss_aggregation": "trajectory_mean"}),
        (DrGRPO, {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0, "loss_aggregation": "constant"}),
        (DAPO, {"clip_low": 0.2, "clip_high": 0.28, "kl_coef": 0.0, "loss_aggregation": "token_mean"}),
        (RLOO, {"kl_coef": 0.03, "kl_estimator": "k1", "kl_placement": "reward", "loss_aggregation": "constant"}),
        (REINFORCEPlusPlus, {"clip_low": 0.2, "discount": 1.0, "kl_estimator": "k1", "kl_placement": "reward"}),
        (REINFORCEPlusPlusBaseline, {"kl_estimator": "k2", "kl_placement": "loss", "loss_aggregation": "token_mean"}),
        (GSPO, {"clip_low": 3e-4, "clip_high": 4e-4, "kl_coef": 0.0, "loss_aggregation": "trajectory_mean"}),
        (CISPO, {"max_ratio": 5.0, "min_ratio": 0.0, "kl_coef": 0.0, "loss_aggregation": "token_mean"}),
        (SAPO, {"temperature_positive": 1.0, "temperature_negative": 1.05, "loss_aggregation": "trajectory_mean"}),
        (SFT, {"generates": False, "completion_column": "completion", "loss_aggregation": "token_mean"}),
    ],
)
def test_algorithm_has_its_papers_defaults(
    algorithm: type[RLModule], defaults: dict[str, Any], model_folder: str
) -> None:
    module = algorithm(model_folder)
    objective = module.policy_objective
    assert {name: getattr(objective, name, getattr(module, name, None)) for name in defaults} == defaults
    assert module.rollout_correction == "auto"


@pytest.mark.parametrize(
    ("algorithm", "arguments", "message"),
    [
        (GRPO, {"clip_low": 0.0}, r"clip_low=0.0 must be in \(0, 1\]"),
        (GRPO, {"clip_high": -0.2}, "clip_high=-0.2 must be above 0"),
        (GRPO, {"dual_clip": 1.1}, r"dual_clip=1.1 must be above 1 \+ clip_high = 1.2"),
        (DAPO, {"max_refills": -1}, "max_refills=-1 and overlong_cache=None must be at least 0"),
        (CISPO, {"max_ratio": 0.28}, "max_ratio=0.28 leave out a ratio of 1.*use max_ratio 1.28"),
        (SAPO, {"temperature_negative": 0.0}, "temperature_negative=0.0 must be above 0"),
        (RLOO, {"updates_per_rollout": 2}, "updates_per_rollout=2 x epochs_per_rollout=1: RLOO's gradient"),
        (REINFORCEPlusPlus, {"discount": 1.5}, r"discount=1.5 must be in \[0, 1\]"),
        (REINFORCEPlusPlus, {"turn_discount": 0.9, "discount": 0.9}, r"^discount=0\.9 and turn_discount=0\.9 both"),
        (GRPO, {"turn_discount": 1.5}, r"^turn_discount=1\.5 must be in \[0, 1\]\."),
    ],
)
def test_wrong_algorithm_arguments_are_refused(
    algorithm: type[RLModule], arguments: dict[str, Any], message: str, model_folder: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        algorithm(model_folder, **arguments)


@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if a is not REINFORCEPlusPlus])
def test_groups_of_one_are_refused_for_training_only(
    algorithm: type[RLModule], model_folder: str, tmp_path: Path
) -> None:
    module = algorithm(model_folder, samples_per_prompt=1)
    module.trainer = trainer = make_trainer(tmp_path, 1)
    trainer.state.fn = TrainerFn.FITTING
    with pytest.raises(ConfigError, match=f"samples_per_prompt=1: {algorithm.__name__} compares"):
        module.configure_callbacks()
    trainer.state.fn = TrainerFn.PREDICTING
    trainer.datamodule = make_data(tmp_path)  # type: ignore[attr-defined]
    module.configure_callbacks()
