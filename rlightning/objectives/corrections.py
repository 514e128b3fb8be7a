"""Corrects for data that is off-policy: importance weights, and decoupled PPO's proximal policy.

Even with equal weights the engine's kernels compute log-probabilities that differ from the trainer's, and with stale
weights they differ more. Both make the data off-policy, which the policy loss's own ratio does not account for. That
ratio is relative to the proximal policy, the one before the update.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlightning.errors import ConfigError, did_you_mean
from rlightning.objectives.policy import MAX_LOG_RATIO, token_log_ratio
from rlightning.objectives.segments import spread_to_tokens, sum_by_sequence

_DEFAULT_BOUNDS = {"truncate": (0.0, 2.0), "mask": (0.0, 2.0), "icepop": (0.5, 5.0)}
_LEVELS = ("token", "sequence_sum", "sequence_mean")


@dataclass(frozen=True, slots=True)
class RolloutCorrection:
    """Settings of importance weights of the policy loss, computed from ``r = pi_trainer(token) / pi_sampler(token)``.

    kind:
        - truncate: ``clip(r, lower, upper)`` (truncated importance sampling; bounds 0 and 2).
        - mask: ``r`` up to ``upper``, 0 beyond (masked importance sampling; bounds 0 and 2).
        - icepop: ``r`` within ``[lower, upper]``, 0 outside on either side (IcePop, arXiv:2510.18855; 0.5 and 5).

    level, the ratio ``r``:
        - token: the ratio of each token; little variance, some bias.
        - sequence_sum: the ratio of the completion, the product of its tokens' ratios: unbiased, but its logarithm
          grows with length, so that the same bounds do not fit short and long completions.
        - sequence_mean: the geometric mean of the completion's token ratios, whose bounds suit any length.

    A token with weight 0 has no gradient, but still counts in the loss's denominator, so that the step is not scaled up
    if many tokens are masked.

    Attributes:
        kind: one of the above.
        level: one of the above.
        lower: the lower bound; None for the kind's default.
        upper: the upper bound; None for the kind's default.
    """

    kind: Literal["truncate", "mask", "icepop"] = "truncate"
    level: Literal["token", "sequence_sum", "sequence_mean"] = "token"
    lower: float | None = None
    upper: float | None = None

    def __post_init__(self) -> None:
        """Raise a ConfigError for bounds that contradict each other or the kind of correction."""
        for name, value, choices in (("kind", self.kind, _DEFAULT_BOUNDS), ("level", self.level, _LEVELS)):
            if value not in choices:
                raise ConfigError(f"rollout_correction.{name}='{value}' is unknown. {did_you_mean(value, choices)}")
        lower, upper = self.bounds
        if self.kind == "mask" and lower != 0:
            raise ConfigError(f"rollout_correction.lower={lower}: kind 'mask' has no lower bound. Use kind 'icepop'.")
        if not 0 <= lower <= 1 <= upper:
            raise ConfigError(
                f"rollout_correction bounds [{lower}, {upper}] leave out a ratio of 1, at which sampler and trainer "
                "agree. Use lower <= 1 <= upper, such as lower 0.5 and upper 2.0."
            )

    @property
    def bounds(self) -> tuple[float, float]:
        """The lower and the upper bound of the ratio; a bound that is None is the default of ``kind``."""
        lower, upper = _DEFAULT_BOUNDS[self.kind]
        return (lower if self.lower is None else self.lower, upper if self.upper is None else self.upper)

    def importance_weights(
        self, logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, cu_seqlens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the importance weight of each token, which multiplies its policy loss.

        Args:
            logprobs: [T], from the trainer, of the policy before the rollout's first update (``batch.old_logprobs``).
            rollout_logprobs: [T], from the sampler.
            mask: [T] bool, the completion tokens.
            cu_seqlens: [N+1], whole sequences.

        Returns:
            [T] float32 weights without gradient, 1 outside ``mask``; and for the metrics, [T] each,
            ``correction_weight`` and ``correction_out_of_bounds`` (1 if the ratio is outside of the bounds).
        """
        log_ratio = torch.where(mask, token_log_ratio(logprobs.detach(), rollout_logprobs.detach()), 0)
        if self.level != "token":
            sums = sum_by_sequence(log_ratio, cu_seqlens)
            if self.level == "sequence_mean":
                sums = sums / sum_by_sequence(mask.float(), cu_seqlens).clamp(min=1)
            sums = sums.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            log_ratio = spread_to_tokens(sums, cu_seqlens, mask.numel())
        ratio = log_ratio.exp()
        lower, upper = self.bounds
        outside = (ratio < lower) | (ratio > upper)
        weights = ratio.clamp(lower, upper) if self.kind == "truncate" else torch.where(outside, 0, ratio)
        weights = torch.where(mask, weights, 1)
        return weights, {"correction_weight": weights, "correction_out_of_bounds": outside.float()}


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
