"""PPO's clipped loss for each token, without masking or aggregation.

The ratio may be that of a token or a sequence: compute a log-ratio with :func:`token_log_ratio` or
:func:`sequence_log_ratio`, and pass it to the loss, which also returns detached per-token values for the metrics.
"""

import torch
from torch import Tensor

from rlightning.objectives.segments import spread_to_tokens, sum_by_sequence

TokenLoss = tuple[Tensor, dict[str, Tensor]]

# e^20 is far beyond every clip, and finite: infinity times an advantage of zero would be NaN.
MAX_LOG_RATIO = 20.0


def token_log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return the log of each token's ratio ``pi(token) / pi_old(token)``: [T] float32, from log-probabilities [T]."""
    return (logprobs.float() - old_logprobs.float()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the log of the geometric mean of a completion's token ratios, on each token (GSPO, arXiv:2507.18071).

    ``s_i = (pi(y_i) / pi_old(y_i))^(1 / |y_i|)`` (eq. 7). The value is the sequence's, the gradient is the token's,
    ``s_i * grad log pi_t`` (GSPO-token, eq. 14). With one advantage for the sequence its mean is the gradient of
    ``s_i`` (eq. 10); it is also correct if tokens have their own weights or advantages.

    Args:
        logprobs: [T], under the policy.
        old_logprobs: [T], under the policy before the rollout's first update.
        mask: [T] bool, the completion tokens; prompts are left out of the mean.
        cu_seqlens: [N+1], whole sequences.

    Returns:
        [T] float32, equal within a sequence.
    """
    logprobs = logprobs.float()
    difference = torch.where(mask, logprobs.detach() - old_logprobs.float(), 0)
    lengths = sum_by_sequence(mask.float(), cu_seqlens).clamp(min=1)
    mean = spread_to_tokens(sum_by_sequence(difference, cu_seqlens) / lengths, cu_seqlens, mask.numel())
    return mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) + (logprobs - logprobs.detach())


def clipped_loss(
    log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> TokenLoss:
    """Return PPO's clipped loss, ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``, with separate bounds.

    PPO (arXiv:1707.06347, eq. 7) has equal bounds, DAPO (arXiv:2503.14476, eq. 8) a higher upper one. With
    ``dual_clip`` = c > 1 the objective of a token with a negative advantage is at least ``c A``, so that a large ratio
    of such a token cannot dominate a batch (dual-clip PPO, arXiv:1912.09729).

    Args:
        log_ratio: [T], of tokens or of their sequence.
        advantages: [T].
        clip_low: the ratio is clipped at ``1 - clip_low``.
        clip_high: the ratio is clipped at ``1 + clip_high``.
        dual_clip: c, or None.

    Returns:
        [T] float32 loss, and ``clip_low`` and ``clip_high``: 1 if this bound makes the gradient 0.
    """
    advantages = advantages.float()
    ratio = log_ratio.float().exp()
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    ratio = ratio.detach()
    below = (ratio < 1 - clip_low) & (advantages < 0)
    above = (ratio > 1 + clip_high) & (advantages > 0)
    return loss, {"clip_low": below.float(), "clip_high": above.float()}
