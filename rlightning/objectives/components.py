"""The terms of a loss, each with its own weight and denominator, so that their sum does not depend on micro-batches.

    loss = sum over components of weight * sum over tokens of term / denominator

A term gives a value for each token, neither masked nor averaged. Denominators count tokens, turns, sequences,
trajectories or groups of the whole optimizer step: all micro-batches, all ranks, all accumulation.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from rlightning.errors import ConfigError
from rlightning.objectives.aggregation import Aggregation, aggregate
from rlightning.objectives.kl import KLEstimator, estimate_kl
from rlightning.objectives.policy import TokenLoss, clipped_loss, sequence_log_ratio, token_log_ratio
from rlightning.types import RolloutBatch


class ForwardPass(NamedTuple):
    """The outputs of the actor's forward pass over a micro-batch.

    Attributes:
        logprobs: [T] float32, of the sampled tokens, with gradient; 0 elsewhere.
        entropy: [T] float32, of the distributions from which tokens were sampled; with gradient if a loss needs it.
    """

    logprobs: Tensor
    entropy: Tensor


@dataclass(frozen=True, slots=True)
class LossComponent:
    """One term of the loss, such as the policy loss or a KL penalty.

    Attributes:
        name: the term is logged as ``policy/<name>``, its mean over sampled tokens.
        term: returns [T] values for a micro-batch, and [T] values by name, without gradient, for the metrics.
        weight: weight of the term in the loss; with 0 the term is only logged.
        denominator: divides the sum over tokens, see :func:`~rlightning.objectives.aggregation.aggregate`.
    """

    name: str
    term: Callable[[ForwardPass, RolloutBatch], TokenLoss]
    weight: float = 1.0
    denominator: Aggregation = "token_mean"

    def __post_init__(self) -> None:
        """Raise a ConfigError for an unknown denominator."""
        if self.denominator not in (known := get_args(Aggregation)):
            raise ConfigError(
                f"The loss component '{self.name}' has denominator={self.denominator!r}, which is none of "
                f"{', '.join(known)}."
            )


def check_names(components: Sequence[LossComponent]) -> None:
    """Raise a ConfigError if two components of a loss have the same name: they would be logged as one."""
    for name, number in Counter(component.name for component in components).items():
        if number > 1:
            raise ConfigError(
                f"loss_components() returns {number} components named '{name}'. Give each its own name; the module's "
                "are loss, kl and entropy. To replace one of these, leave it out of what super() returns."
            )


def sum_components(
    components: Sequence[LossComponent], values: Sequence[Tensor], batch: RolloutBatch, *, constant: float
) -> Tensor:
    """Return a micro-batch's share of the loss of its optimizer step; the shares of all micro-batches sum to the loss.

    Terms with the same denominator are added token by token before they are reduced.

    Args:
        components: terms of the loss, at least one with a weight.
        values: results of the components' terms, [T] each.
        batch: a micro-batch, with ``totals``.
        constant: number of tokens for the denominator "constant".

    Returns:
        A float32 scalar.
    """
    assert batch.totals is not None
    sums: dict[Aggregation, Tensor] = {}
    for component, value in zip(components, values, strict=True):
        if component.weight:
            weighted, kind = component.weight * value, component.denominator
            sums[kind] = sums[kind] + weighted if kind in sums else weighted
    shares = [
        aggregate(
            summed,
            batch.is_sampled,
            batch.cu_seqlens,
            kind,
            batch.totals,
            turn_ids=batch.turn_ids,
            trajectory_lengths=batch.to_tokens(batch.completion_lengths),
            group_lengths=None if batch.group_lengths is None else batch.to_tokens(batch.group_lengths),
            constant=constant,
        )
        for kind, summed in sums.items()
    ]
    return sum(shares[1:], shares[0])


PolicyObjective = Callable[[Tensor, RolloutBatch], TokenLoss]
"""A policy loss: from [T] log-probabilities with gradient, and a micro-batch, to [T] losses and [T] metrics by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedSurrogate:
    """PPO's clipped loss: :func:`~rlightning.objectives.clipped_loss` of the ratio of each token or of its sequence.

    Attributes:
        clip_low: the ratio is clipped at ``1 - clip_low``.
        clip_high: the ratio is clipped at ``1 + clip_high``.
        dual_clip: bounds the loss of negative advantages, or None.
        level: whether the ratio is a token's, or the geometric mean of its sequence's (GSPO).
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    level: Literal["token", "sequence"] = "token"

    def __post_init__(self) -> None:
        """Raise a ConfigError for clip bounds that leave no range for the ratio."""
        low, high, dual = self.clip_low, self.clip_high, self.dual_clip
        if not 0 < low <= 1:
            raise ConfigError(f"clip_low={low} must be in (0, 1]: ratios are clipped at 1 - clip_low. Try 0.2.")
        if high <= 0:
            raise ConfigError(f"clip_high={high} must be above 0: ratios are clipped at 1 + clip_high. Try 0.2.")
        if dual is not None and dual <= 1 + high:
            raise ConfigError(f"dual_clip={dual} must be above 1 + clip_high = {1 + high}. Try 3.0, or null.")

    def __call__(self, logprobs: Tensor, batch: RolloutBatch) -> TokenLoss:
        """Return [T] losses, and the shares of tokens that each bound clipped."""
        assert batch.old_logprobs is not None and batch.advantages is not None
        if self.level == "token":
            log_ratio = token_log_ratio(logprobs, batch.old_logprobs)
        else:
            log_ratio = sequence_log_ratio(logprobs, batch.old_logprobs, batch.is_sampled, batch.cu_seqlens)
        return clipped_loss(
            log_ratio, batch.advantages, clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=self.dual_clip
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CappedWeight:
    """REINFORCE with a detached, clipped importance weight (CISPO, arXiv:2506.13585, eqs. 4 and 5).

    ``-sg(clip(r, min_ratio, max_ratio)) A log pi``: every token has a gradient, only its weight is bounded.

    Both bounds are absolute values of the ratio. The paper writes the upper one as ``1 + eps_high``, ScaleRL
    (arXiv:2510.13786) as an absolute cap, and code bases call either "epsilon": ``max_ratio`` = 5 here is an
    ``eps_high`` of 4 there. ``min_ratio`` = 0 is the paper's "no lower bound".

    Attributes:
        max_ratio: the largest weight.
        min_ratio: the smallest weight.
    """

    max_ratio: float
    min_ratio: float = 0.0

    def __post_init__(self) -> None:
        """Raise a ConfigError for bounds that exclude a ratio of 1."""
        if not 0 <= self.min_ratio <= 1 <= self.max_ratio:
            raise ConfigError(
                f"min_ratio={self.min_ratio} and max_ratio={self.max_ratio} leave out a ratio of 1, that of an "
                "unchanged policy. They are absolute values: where others say eps_high 0.28, use max_ratio 1.28."
            )

    def __call__(self, logprobs: Tensor, batch: RolloutBatch) -> TokenLoss:
        """Return [T] float32 losses, and ``clip_low`` and ``clip_high``: 1 if this bound clips the weight."""
        assert batch.old_logprobs is not None and batch.advantages is not None
        ratio = token_log_ratio(logprobs, batch.old_logprobs).detach().exp()
        loss = -ratio.clamp(self.min_ratio, self.max_ratio) * batch.advantages.float() * logprobs.float()
        return loss, {"clip_low": (ratio < self.min_ratio).float(), "clip_high": (ratio > self.max_ratio).float()}


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftGate:
    """A loss with a sigmoid gate in place of the clip (SAPO, arXiv:2511.20347, eqs. 5 and 6).

    ``-4 / tau * sigmoid(tau (r - 1)) A``, where tau depends on the advantage's sign. The gradient's weight is ``4 p (1
    - p) r`` with ``p = sigmoid(tau (r - 1))``: 1 on policy, and decaying smoothly on both sides.

    Attributes:
        temperature_positive: tau where the advantage is positive.
        temperature_negative: tau otherwise; a larger one decays faster.
    """

    temperature_positive: float
    temperature_negative: float

    def __post_init__(self) -> None:
        """Raise a ConfigError for temperatures that are not positive."""
        for name, temperature in asdict(self).items():
            if temperature <= 0:
                raise ConfigError(f"{name}={temperature} must be above 0.")

    def __call__(self, logprobs: Tensor, batch: RolloutBatch) -> TokenLoss:
        """Return [T] float32 losses, and ``gate``: ``4 p (1 - p)``."""
        assert batch.old_logprobs is not None and batch.advantages is not None
        advantages = batch.advantages.float()
        negative, positive = self.temperature_negative, self.temperature_positive
        temperature = torch.full_like(advantages, negative).masked_fill(advantages > 0, positive)
        gate = torch.sigmoid(temperature * (token_log_ratio(logprobs, batch.old_logprobs).exp() - 1))
        return -4 / temperature * gate * advantages, {"gate": (4 * gate * (1 - gate)).detach()}


def reinforce(logprobs: Tensor, batch: RolloutBatch) -> TokenLoss:
    """Return ``-A log pi``, the plain policy gradient: [T] float32; unbiased only on-policy: one update a rollout."""
    assert batch.advantages is not None
    return -batch.advantages.float() * logprobs.float(), {}


def cross_entropy(logprobs: Tensor, batch: RolloutBatch) -> TokenLoss:
    """Return the negative log-likelihood of each token: [T]."""
    return -logprobs.float(), {}


@dataclass(frozen=True, slots=True)
class ReferenceKL:
    """The KL penalty as a loss term: the divergence from the reference model, estimated on each token.

    Attributes:
        estimator: see :func:`~rlightning.objectives.kl.estimate_kl`.
    """

    estimator: KLEstimator

    def __call__(self, forward: ForwardPass, batch: RolloutBatch) -> TokenLoss:
        """Return [T] estimates, in nats."""
        assert batch.ref_logprobs is not None
        return estimate_kl(forward.logprobs, batch.ref_logprobs, self.estimator), {}


def entropy(forward: ForwardPass, batch: RolloutBatch) -> TokenLoss:
    """Return the entropy of each token's distribution, in nats: [T]. A negative weight makes it a bonus."""
    return forward.entropy, {}
