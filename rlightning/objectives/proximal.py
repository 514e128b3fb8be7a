"""Decoupled PPO's proximal policy: the one before the update, which the loss's ratio is relative to."""

import torch
from torch import Tensor


def approximate_proximal(logprobs: Tensor, rollout_logprobs: Tensor, ages: Tensor, progress: float) -> Tensor:
    """Approximate the log-probabilities under the policy before the update without a forward pass.

    Between the sampler, ``ages`` updates behind, and the policy now, ``progress`` of an update ahead, log-probabilities
    are taken to move evenly (A-3PO, arXiv:2512.06547, with the versions counted in parts of an update):
    ``log p = log sampler + ages / (ages + progress) * (log now - log sampler)``. That is exact before the first
    optimizer step, and for tokens of age 0.

    Args:
        logprobs: [T], of the policy now; its gradient is not followed.
        rollout_logprobs: [T], of the sampler.
        ages: [T], updates between the sampler's weights and those that the update began with.
        progress: share of the update's optimizer steps that are done, from 0 to less than 1.

    Returns:
        [T] float32.
    """
    now = logprobs.detach()
    if progress == 0:
        return now
    share = ages.clamp(min=0).float()
    return torch.lerp(rollout_logprobs.float(), now.float(), share / (share + progress))
