"""Whether a loss has a gradient on sequences without advantage, found by differentiating it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import make_batch
from torch import Tensor, nn

from rlightning.objectives import (
    CappedWeight,
    ClippedSurrogate,
    ForwardPass,
    LossComponent,
    ReferenceKL,
    RolloutCorrection,
    SoftGate,
    cross_entropy,
    entropy,
    has_zero_gradient,
    reinforce,
    sequence_log_ratio,
)
from rlightning.types import RolloutBatch

Term = Callable[[ForwardPass, RolloutBatch], tuple[Tensor, dict[str, Tensor]]]
CRITIC = nn.Embedding(16, 1)


def without_advantage() -> RolloutBatch:
    batch = make_batch([[(3, 4, 5), (6, 0)], [(7,), (8, 9, 10, 11)]])
    batch.advantages, batch.ref_logprobs = torch.zeros(batch.num_tokens), torch.zeros(batch.num_tokens)
    return batch


def policy(objective: Any) -> Term:
    return lambda forward, batch: objective(forward.logprobs, batch)


def corrected(forward: ForwardPass, batch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
    assert batch.old_logprobs is not None
    weights, _ = RolloutCorrection("icepop", "sequence_sum").importance_weights(
        batch.old_logprobs, batch.rollout_logprobs, batch.is_sampled, batch.cu_seqlens
    )
    return reinforce(forward.logprobs, batch)[0] * weights, {}


def centred_log_ratio(forward: ForwardPass, batch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Its tokens' losses add up to nothing, and so do their gradients where all weigh the same."""
    assert batch.old_logprobs is not None
    ratio = sequence_log_ratio(forward.logprobs, batch.old_logprobs, batch.is_sampled, batch.cu_seqlens)
    return ratio - ratio[batch.is_sampled].mean(), {}


def far_from_old(forward: ForwardPass, batch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """A penalty that begins where a ratio is e^3."""
    assert batch.old_logprobs is not None
    return (forward.logprobs - batch.old_logprobs - 3).relu(), {}


def near_old(forward: ForwardPass, batch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """A trust region about a ratio of 1."""
    assert batch.old_logprobs is not None
    return (0.001 - (forward.logprobs - batch.old_logprobs).abs()).relu(), {}


def on_prompt(forward: ForwardPass, batch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return torch.where(batch.is_sampled, 0, forward.logprobs), {}


def value(forward: ForwardPass, batch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return CRITIC(batch.token_ids)[:, 0].square(), {}


def not_a_number(forward: ForwardPass, batch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return forward.logprobs * torch.nan, {}


@pytest.mark.parametrize(
    "term",
    [
        policy(ClippedSurrogate()),
        policy(ClippedSurrogate(clip_low=3e-4, clip_high=4e-4, level="sequence")),
        policy(ClippedSurrogate(dual_clip=3.0)),
        policy(CappedWeight(max_ratio=5.0)),
        policy(SoftGate(temperature_positive=1.0, temperature_negative=1.05)),
        policy(reinforce),
        corrected,
        on_prompt,
        lambda forward, batch: (torch.ones(batch.num_tokens), {}),
    ],
)
def test_terms_that_advantages_multiply_have_no_gradient(term: Term) -> None:
    state = torch.get_rng_state()
    assert has_zero_gradient([LossComponent("loss", term)], without_advantage())
    assert torch.equal(torch.get_rng_state(), state)
    batch = without_advantage()
    assert batch.advantages is not None
    batch.advantages += 1
    is_constant = term is on_prompt or (getattr(term, "__name__", "") == "<lambda>" and term.__closure__ is None)
    assert has_zero_gradient([LossComponent("loss", term)], batch) == is_constant


@pytest.mark.parametrize(
    "term",
    [
        *(ReferenceKL(kind) for kind in ("k1", "k2", "k3")),
        entropy,
        lambda forward, batch: cross_entropy(forward.logprobs, batch),
        centred_log_ratio,
        far_from_old,
        near_old,
        value,
        not_a_number,
    ],
)
def test_terms_with_own_gradient_are_found(term: Term) -> None:
    usual = LossComponent("loss", policy(ClippedSurrogate()))
    assert not has_zero_gradient([usual, LossComponent("own", term)], without_advantage())
    assert has_zero_gradient([usual, LossComponent("own", term, weight=0.0)], without_advantage())


def test_rollout_that_is_not_finite_counts_as_gradient() -> None:
    batch = without_advantage()
    batch.rollout_logprobs[4] = torch.nan
    assert not has_zero_gradient([LossComponent("loss", corrected)], batch)


def test_corrected_loss_is_differentiated_where_let_through() -> None:
    """Sequences as long as those of runs: a mean over random log-ratios is out of bounds on every one of them."""
    batch = make_batch([[(3, 4, 5) * 100, (6, 7, 8) * 100]])
    batch.advantages = torch.zeros(batch.num_tokens)
    batch.rollout_logprobs = torch.where(batch.is_sampled, -0.5, 0.0)

    def shifted(forward: ForwardPass, batch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.old_logprobs is not None and batch.advantages is not None
        weights, _ = RolloutCorrection("icepop", "sequence_mean").importance_weights(
            batch.old_logprobs, batch.rollout_logprobs, batch.is_sampled, batch.cu_seqlens
        )
        return -(batch.advantages + 0.1) * forward.logprobs * weights, {}

    assert not has_zero_gradient([LossComponent("loss", shifted)], batch)


def test_every_rank_evaluates_every_term_as_often() -> None:
    """A term may run a sharded model, of which all ranks have to make as many passes."""
    counts = []
    for own in (entropy, policy(reinforce)):  # the first has a gradient
        calls: list[None] = []

        def counted(
            forward: ForwardPass, batch: RolloutBatch, own: Term = own, calls: list[None] = calls
        ) -> tuple[Tensor, dict[str, Tensor]]:
            calls.append(None)
            return own(forward, batch)

        has_zero_gradient([LossComponent("own", own), LossComponent("counted", counted)], without_advantage())
        counts.append(len(calls))
    assert counts[0] == counts[1]
