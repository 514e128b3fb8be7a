"""The sum of a loss's components: weights, denominators of their own, and one of them a user's."""

import pytest
import torch
from tiny import make_batch
from torch import Tensor

from rlightning.errors import ConfigError
from rlightning.objectives import (
    ForwardPass,
    LossComponent,
    ReferenceKL,
    check_names,
    cross_entropy,
    entropy,
    reinforce,
    sum_components,
)
from rlightning.types import LossTotals, RolloutBatch


def per_token(forward: ForwardPass, batch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss that is the log-probability itself."""
    return forward.logprobs, {}


def make_forward(batch: RolloutBatch) -> ForwardPass:
    """Log-probabilities 1, 2, 3, ... and entropies 10, 20, 30, ... of the completion tokens; NaN on prompts."""
    counted = batch.is_sampled.long().cumsum(0).double()
    return ForwardPass(
        torch.where(batch.is_sampled, counted, torch.nan).requires_grad_(),
        torch.where(batch.is_sampled, 10 * counted, torch.nan).requires_grad_(),
    )


def total(components: list[LossComponent], forward: ForwardPass, batch: RolloutBatch) -> Tensor:
    values = [component.term(forward, batch)[0] for component in components]
    return sum_components(components, values, batch, constant=5)


def test_each_component_has_its_own_weight_and_denominator() -> None:
    batch = make_batch([[[1, 2, 0], [3]]])  # completions of three tokens and of one
    batch.totals = LossTotals(
        tokens=8, sequences=4, trajectories=4, groups=2, turns=4
    )  # of another such micro-batch, too
    forward = make_forward(batch)
    components = [
        LossComponent("by token", per_token, denominator="token_mean"),
        LossComponent("by sequence", per_token, weight=2.0, denominator="sequence_mean"),
        LossComponent("by constant", per_token, weight=-3.0, denominator="constant"),
        LossComponent("entropy", entropy, weight=-0.1),
        LossComponent("logged", entropy, weight=0.0),
    ]
    loss = total(components, forward, batch)
    # Tokens 1, 2, 3 and 4: (1 + 2 + 3 + 4) / 8; 2 * (2 + 4) / 4; -3 * 10 / (4 * 5); -0.1 * 100 / 8.
    assert loss.item() == pytest.approx(1.25 + 3.0 - 1.5 - 1.25)
    loss.backward()
    sampled = batch.is_sampled
    assert forward.logprobs.grad is not None and forward.entropy.grad is not None
    # 1/8 - 3/20 each, and 2/4 over the sequence's number of tokens.
    assert forward.logprobs.grad[sampled].tolist() == pytest.approx([-0.025 + 1 / 6] * 3 + [-0.025 + 0.5])
    assert forward.entropy.grad[sampled].tolist() == pytest.approx([-0.1 / 8] * 4)
    assert (forward.logprobs.grad[~sampled] == 0).all()


def test_components_have_hand_computed_terms() -> None:
    batch = make_batch([[[1, 0]]])
    batch.advantages, batch.ref_logprobs = torch.full((4,), 2.0), torch.zeros(4)
    forward = make_forward(batch)
    sampled = batch.is_sampled
    assert reinforce(forward.logprobs, batch)[0][sampled].tolist() == [-2.0, -4.0]
    assert cross_entropy(forward.logprobs, batch)[0][sampled].tolist() == [-1.0, -2.0]
    assert ReferenceKL("k2")(forward, batch)[0][sampled].tolist() == [0.5, 2.0]
    assert entropy(forward, batch)[0][sampled].tolist() == [10.0, 20.0]


def test_components_of_one_denominator_are_one_sum() -> None:
    """The bits are those of a loss that is added up token by token."""
    torch.manual_seed(0)
    batch = make_batch([[[1, 2, 0], [3, 1]], [[2], [0]]])
    batch.totals = LossTotals(tokens=7, sequences=4, trajectories=4, groups=2, turns=4)
    logprobs, entropies = torch.randn(batch.num_tokens), torch.randn(batch.num_tokens)
    batch.ref_logprobs = torch.randn(batch.num_tokens)
    components = [
        LossComponent("loss", per_token),
        LossComponent("kl", ReferenceKL("k1"), weight=0.3),
        LossComponent("entropy", entropy, weight=-0.7),
    ]
    by_hand = logprobs + 0.3 * (logprobs - batch.ref_logprobs) - 0.7 * entropies
    expected = torch.where(batch.is_sampled, by_hand, 0).sum() / 7
    assert torch.equal(total(components, ForwardPass(logprobs, entropies), batch), expected)


@pytest.mark.parametrize("taken", ["loss", "mine"])
def test_names_that_are_taken_are_refused(taken: str) -> None:
    components = [LossComponent("loss", per_token), LossComponent("mine", per_token), LossComponent(taken, per_token)]
    with pytest.raises(ConfigError, match=rf"^loss_components\(\) returns 2 components named '{taken}'\. Give each "):
        check_names(components)


def test_unknown_denominator_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^The loss component 'mine' has denominator='tokens', .* token_mean, turn_"):
        LossComponent("mine", per_token, denominator="tokens")  # type: ignore[arg-type]
