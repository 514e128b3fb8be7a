"""Decoupled PPO's proximal policy: the policy before the update, relative to which the loss's ratio is computed."""

import torch
from torch import Tensor


def approximate_proximal(logprobs: Tensor, rollout_logprobs: Tensor, staleness: Tensor, progress: float) -> Tensor:
    """Return approximate log-probabilities of tokens under the policy before this update, without a forward pass.

    Log-probabilities are interpolated linearly between the sampler, ``staleness`` updates before, and the current
    policy, which is ``progress`` of an update newer (A-3PO, arXiv:2512.06547, with versions in fractions of an update):
    ``log p = log sampler + staleness / (staleness + progress) * (log now - log sampler)``. This is exact before the
    first optimizer step, and for tokens that are not stale.

    Args:
        logprobs: [T], of the current policy; no gradient flows through these.
        rollout_logprobs: [T], of the sampler.
        staleness: [T], number of updates between the sampler's weights and those before this update.
        progress: share of the update's optimizer steps that have been taken, at least 0 and below 1.

    Returns:
        [T] float32.
    """
    now = logprobs.detach().float()
    if progress == 0:
        return now
    share = staleness.clamp(min=0).float()
    return torch.lerp(rollout_logprobs.float(), now, share / (share + progress))
