import math

import pytest
import torch
from torch import Tensor

from rlightning.objectives import KLEstimator, estimate_kl, subtract_kl

ESTIMATORS: list[KLEstimator] = ["k1", "k2", "k3"]


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(loss.sum(), of, retain_graph=True)[0]


def test_kl_estimators_equal_hand_computed_values() -> None:
    logprobs, reference = torch.tensor([math.log(0.5), math.log(0.2)]), torch.tensor([math.log(0.25), math.log(0.8)])
    # Ratios reference / policy: 0.25 / 0.5 = 1/2 and 0.8 / 0.2 = 4, so d = log 2 and -log 4.
    torch.testing.assert_close(estimate_kl(logprobs, reference, "k1"), torch.tensor([math.log(2), -math.log(4)]))
    k2 = torch.tensor([math.log(2) ** 2 / 2, math.log(4) ** 2 / 2])
    torch.testing.assert_close(estimate_kl(logprobs, reference, "k2"), k2)
    k3 = torch.tensor([1 / 2 + math.log(2) - 1, 4 - math.log(4) - 1])
    torch.testing.assert_close(estimate_kl(logprobs, reference, "k3"), k3)


def test_gradients_are_what_the_docstring_says() -> None:
    """Over a whole vocabulary, with expectations in place of samples."""
    logits = torch.tensor([0.3, -1.0, 0.8], requires_grad=True)
    reference = torch.tensor([-0.2, 0.5, 0.1]).log_softmax(0)
    policy = logits.log_softmax(0)

    def expected_gradient(estimator: KLEstimator) -> Tensor:
        return gradient(policy.exp().detach() * estimate_kl(policy, reference, estimator), logits)

    reverse = gradient(policy.exp() * (policy - reference), logits)
    forward = gradient(reference.exp() * (reference - policy), logits)
    torch.testing.assert_close(expected_gradient("k1"), torch.zeros(3))
    torch.testing.assert_close(expected_gradient("k2"), reverse)
    torch.testing.assert_close(expected_gradient("k3"), forward)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_policies_give_zero_kl_k1_keeps_gradient(estimator: KLEstimator) -> None:
    logprobs = torch.tensor([-0.1, -3.0]).requires_grad_()
    kl = estimate_kl(logprobs, logprobs.detach(), estimator)
    grad = gradient(kl, logprobs)
    assert torch.equal(kl, torch.zeros(2))
    assert torch.equal(grad, torch.full((2,), 1.0 if estimator == "k1" else 0.0))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_bfloat16_is_computed_in_float32_and_stays_finite(estimator: KLEstimator) -> None:
    kl = estimate_kl(torch.tensor([-3.0, -500.0]).bfloat16(), torch.tensor([-3.015625, -1.0]).bfloat16(), estimator)
    assert kl.dtype == torch.float32
    assert torch.isfinite(kl).all()
    d = 0.015625
    expected = {"k1": d, "k2": d**2 / 2, "k3": math.exp(-d) + d - 1}[estimator]
    torch.testing.assert_close(kl[0], torch.tensor(expected), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_k3_pulls_back_beyond_20_nats(dtype: torch.dtype) -> None:
    """With x = log of reference over policy: e^x - x - 1 up to 20, and its tangent there beyond."""
    logprobs = torch.tensor([-16.0, -20.0, -32.0, -500.0], dtype=dtype, requires_grad=True)
    kl = estimate_kl(logprobs, torch.zeros(4, dtype=dtype), "k3")
    e20 = math.exp(20)
    values = [math.exp(16) - 17, e20 - 21, e20 - 21 + 12 * (e20 - 1), e20 - 21 + 480 * (e20 - 1)]
    torch.testing.assert_close(kl, torch.tensor(values), rtol=1e-6, atol=0)
    gradients = [1 - math.exp(16), 1 - e20, 1 - e20, 1 - e20]
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(gradient(kl, logprobs).float(), torch.tensor(gradients), rtol=tolerance, atol=0)


def test_subtract_kl_by_hand() -> None:
    kl = torch.tensor([9.0, 0.5, 0.25, 9.0, 2.0])
    mask = torch.tensor([False, True, True, False, True])
    result = subtract_kl(torch.tensor([1.0, 0.0]), kl, mask, torch.tensor([0, 0, 0, 1, 1]), 0.1)
    # 1 - 0.1 * (0.5 + 0.25) and 0 - 0.1 * 2.
    torch.testing.assert_close(result, torch.tensor([0.925, -0.2], dtype=torch.float64))
