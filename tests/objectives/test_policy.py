import math

import pytest
import torch
from torch import Tensor

from rlightning.objectives import (
    CappedWeight,
    SoftGate,
    aggregate,
    clipped_loss,
    reinforce,
    sequence_log_ratio,
    token_log_ratio,
)
from rlightning.types import LossTotals, RolloutBatch


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(loss.sum(), of)[0]


LOG = math.log


def policy_batch(old_logprobs: Tensor, advantages: Tensor) -> RolloutBatch:
    """One sequence with these old log-probabilities and advantages, [T] each."""
    batch = RolloutBatch.of_sequences([[0] * old_logprobs.numel()])
    batch.old_logprobs, batch.advantages = old_logprobs, advantages
    return batch


def test_clipped_loss_by_hand() -> None:
    # Bounds 0.8 and 1.28.            clipped above, not clipped, not clipped, clipped below, inside
    log_ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1]).log().requires_grad_()
    advantages = torch.tensor([2.0, -2.0, 2.0, -2.0, 1.0])
    loss, metrics = clipped_loss(log_ratio, advantages, clip_low=0.2, clip_high=0.28)
    # -min(1.5 * 2, 1.28 * 2); -min(1.5 * -2, 1.28 * -2); -min(0.5 * 2, 0.8 * 2); -min(0.5 * -2, 0.8 * -2); -1.1
    torch.testing.assert_close(loss, torch.tensor([-2.56, 3.0, -1.0, 1.6, -1.1]))
    assert metrics["clip_high"].tolist() == [1, 0, 0, 0, 0]
    assert metrics["clip_low"].tolist() == [0, 0, 0, 1, 0]
    # The metrics mark exactly the tokens without a gradient.
    grad = gradient(loss, log_ratio)
    clipped = (metrics["clip_low"] + metrics["clip_high"]).bool()
    assert torch.equal(grad == 0, clipped)
    # d(-r A) / d log r = -r A.
    torch.testing.assert_close(grad[~clipped], torch.tensor([3.0, -1.0, -1.1]))


def test_dual_clip_by_hand() -> None:
    ratio, advantages = torch.tensor([10.0, 10.0, 2.0]), torch.tensor([-1.0, 1.0, -1.0])
    loss, _ = clipped_loss(ratio.log(), advantages, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    # The first would be 10 and is held at 3; the others are 10 clipped to 1.2, and 2.
    torch.testing.assert_close(loss, torch.tensor([3.0, -1.2, 2.0]))


def test_sequence_log_ratio_by_hand() -> None:
    # Differences 0.3 and 0.1 over a completion of two, -0.4 over one of one; prompts (7.0) are left out.
    logprobs = torch.tensor([7.0, -1.0, -2.0, 7.0, -1.4])
    old = torch.tensor([0.0, -1.3, -2.1, 0.0, -1.0])
    mask = torch.tensor([False, True, True, False, True])
    result = sequence_log_ratio(logprobs, old, mask, torch.tensor([0, 3, 5]))
    torch.testing.assert_close(result, torch.tensor([0.2, 0.2, 0.2, -0.4, -0.4]))


def test_sequence_ratio_has_gradient_of_geometric_mean() -> None:
    """GSPO eq. 10, through a mean over tokens and then over sequences, against eq. 5 written out."""
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -1.4], requires_grad=True)
    old = torch.tensor([-1.3, -2.1, -0.5, -1.0])
    mask, cu_seqlens = torch.ones(4, dtype=torch.bool), torch.tensor([0, 3, 4])
    log_ratio = sequence_log_ratio(logprobs, old, mask, cu_seqlens)
    loss, _ = clipped_loss(log_ratio, torch.tensor([2.0, 2.0, 2.0, -1.0]), clip_low=0.9, clip_high=0.9)
    share = aggregate(loss, mask, cu_seqlens, "sequence_mean", LossTotals(4, 2, 2, 2, 2))
    ours = torch.autograd.grad(share, logprobs)[0]
    first = ((logprobs[:3] - old[:3]).sum() / 3).exp()
    second = (logprobs[3] - old[3]).exp()
    plain = -(first * 2.0 + second * -1.0) / 2
    torch.testing.assert_close(share, plain)
    torch.testing.assert_close(ours, torch.autograd.grad(plain, logprobs)[0])


def test_capped_weight_by_hand() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    ratio, advantages = torch.tensor([8.0, 0.25, 1.0]), torch.tensor([1.0, 1.0, -2.0])
    loss, metrics = CappedWeight(max_ratio=5.0)(logprobs, policy_batch(logprobs.detach() - ratio.log(), advantages))
    # Weights 5 (an absolute cap, not 1 + 5), 0.25 and 1; the gradient is -weight * A and nothing is dropped.
    torch.testing.assert_close(loss, torch.tensor([5.0, 0.5, -6.0]))
    grad = gradient(loss, logprobs)
    torch.testing.assert_close(grad, torch.tensor([-5.0, -0.25, 2.0]))
    assert metrics["clip_high"].tolist() == [1, 0, 0]
    assert metrics["clip_low"].tolist() == [0, 0, 0]


def test_capped_weight_never_differentiates_the_weight() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    loss, _ = CappedWeight(max_ratio=5.0)(logprobs, policy_batch(torch.tensor([-1.5]), torch.ones(1)))
    grad = gradient(loss, logprobs)
    torch.testing.assert_close(grad, -torch.tensor([math.exp(0.5)]))


def test_soft_gate_by_hand() -> None:
    logprobs = torch.tensor([0.0, LOG(2.0), LOG(2.0)]).sub(3).requires_grad_()
    batch = policy_batch(torch.full((3,), -3.0), torch.tensor([3.0, 1.0, -1.0]))
    loss, metrics = SoftGate(temperature_positive=1.0, temperature_negative=1.05)(logprobs, batch)

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    # On policy 4 / 1 * sigmoid(0) * 3 = 6. At ratio 2: 4 / tau * sigmoid(tau * 1).
    expected = torch.tensor([-6.0, -4 * sigmoid(1.0), 4 / 1.05 * sigmoid(1.05)])
    torch.testing.assert_close(loss, expected)
    grad = gradient(loss, logprobs)
    # -A * 4 p (1 - p) * r: on policy that is -A, whatever the temperature.
    positive, negative = (4 * sigmoid(x) * (1 - sigmoid(x)) for x in (1.0, 1.05))
    torch.testing.assert_close(grad, torch.tensor([-3.0, -2 * positive, 2 * negative]))
    torch.testing.assert_close(metrics["gate"], torch.tensor([1.0, positive, negative]))


def test_reinforce_by_hand() -> None:
    logprobs = torch.tensor([-1.0, -2.0])
    loss, metrics = reinforce(logprobs, policy_batch(logprobs, torch.tensor([0.5, -3.0])))
    torch.testing.assert_close(loss, torch.tensor([0.5, -6.0]))
    assert metrics == {}


LOSSES = {
    "clipped": lambda new, old, a: clipped_loss(token_log_ratio(new, old), a, clip_low=0.2, clip_high=0.28)[0],
    "dual": lambda new, old, a: clipped_loss(token_log_ratio(new, old), a, clip_low=0.2, clip_high=0.2, dual_clip=3.0)[
        0
    ],
    "sequence": lambda new, old, a: clipped_loss(
        sequence_log_ratio(new, old, torch.ones_like(a, dtype=torch.bool), torch.tensor([0, 2, a.numel()])),
        a,
        clip_low=3e-4,
        clip_high=4e-4,
    )[0],
    "capped": lambda new, old, a: CappedWeight(max_ratio=5.0)(new, policy_batch(old, a))[0],
    "gate": lambda new, old, a: SoftGate(temperature_positive=1.0, temperature_negative=1.05)(
        new, policy_batch(old, a)
    )[0],
    "reinforce": lambda new, old, a: reinforce(new, policy_batch(old, a))[0],
}


@pytest.mark.parametrize("name", LOSSES)
def test_zero_advantages_give_an_exactly_zero_gradient(name: str) -> None:
    # Some tokens on policy, some so far off that a ratio in float32 would overflow.
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -0.1]).requires_grad_()
    old = torch.tensor([-1.0, -2.5, -0.1, -500.0])
    grad = gradient(LOSSES[name](logprobs, old, torch.zeros(4)), logprobs)
    assert torch.equal(grad, torch.zeros(4))


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_losses_have_gradient_of_reinforce(name: str) -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -0.1]).requires_grad_()
    advantages = torch.tensor([1.0, 1.0, -2.0, -2.0])
    grad = gradient(LOSSES[name](logprobs, logprobs.detach(), advantages), logprobs)
    torch.testing.assert_close(grad, -advantages)


@pytest.mark.parametrize("name", LOSSES)
def test_bfloat16_is_computed_in_float32(name: str) -> None:
    new, old = torch.tensor([-1.0, -2.0, -0.5]).bfloat16(), torch.tensor([-1.0078125, -2.0, -0.5]).bfloat16()
    advantages: Tensor = torch.tensor([1.0, -1.0, 0.5]).bfloat16()
    loss = LOSSES[name](new, old, advantages)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, LOSSES[name](new.float(), old.float(), advantages.float()), rtol=0, atol=0)
