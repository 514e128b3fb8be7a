"""Estimators of the KL divergence from the reference model, for each token."""

from typing import Literal

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]


def estimate_kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(policy || reference) from each sampled token (http://joschu.net/blog/kl-approx.html).

    With ``d = logprobs - ref_logprobs``: k1 is ``d``, k2 is ``d^2 / 2``, k3 is ``exp(-d) + d - 1``. In expectation over
    the policy's own samples k1 and k3 are the divergence itself; k3 is never negative and varies less; k2 is biased.

    The gradients differ (arXiv:2512.21852). In the reward, which is not differentiated, k1 is unbiased. In the loss the
    gradient of k1 is zero in expectation, so that it is only noise; k2 has the gradient of KL(policy || reference); k3,
    used by GRPO (arXiv:2402.03300, eq. 4), that of KL(reference || policy), which is similar only near the reference.
    All of this assumes samples of the current policy. If the reference's probability of a token is more than e^20 times
    the policy's, k3 is continued linearly from 20 nats.

    Args:
        logprobs: [T], of the sampled tokens under the policy; the gradient flows through these.
        ref_logprobs: [T], under the reference model.
        estimator: k1, k2 or k3.

    Returns:
        [T] float32.
    """
    difference = logprobs.float() - ref_logprobs.float()
    match estimator:
        case "k1":
            return difference
        case "k2":
            return 0.5 * difference**2
        case "k3":
            # Beyond 20 nats, continue by the tangent: finite, with a gradient of e^20 - 1.
            bounded = (-difference).clamp(max=20.0)
            return torch.exp(bounded) * (1 - difference - bounded) + difference - 1


def subtract_kl(rewards: Tensor, kl: Tensor, mask: Tensor, trajectory_ids: Tensor, coefficient: float) -> Tensor:
    """Subtract each trajectory's KL from its reward: ``R = r - coefficient * sum_t kl_t`` (RLOO, arXiv:2402.14740).

    Args:
        rewards: [M].
        kl: [T], an estimate for each token.
        mask: [T] bool, the sampled tokens.
        trajectory_ids: [T] int64, the trajectory to which each token belongs.
        coefficient: the penalty's weight.

    Returns:
        [M] float64.
    """
    charged = torch.where(mask, kl.double(), 0)
    return rewards.double() - coefficient * charged.new_zeros(rewards.numel()).index_add(0, trajectory_ids, charged)
