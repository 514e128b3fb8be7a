"""Pure tensor functions: advantages, policy losses, KL estimators, aggregation, off-policy corrections.

Letters in shapes: ``T`` tokens of the batch, packed end to end; ``N`` sequences; sequence ``i`` is
``cu_seqlens[i]:cu_seqlens[i+1]``. Reductions are in float32 or wider for inputs of any precision.
"""

from rlightning.objectives.advantages import (
    group_advantages,
    has_signal,
    leave_one_out,
    overlong_penalty,
    token_returns,
    whiten,
)
from rlightning.objectives.aggregation import Aggregation, aggregate
from rlightning.objectives.components import (
    CappedWeight,
    ClippedSurrogate,
    ForwardPass,
    LossComponent,
    PolicyObjective,
    ReferenceKL,
    SoftGate,
    check_names,
    cross_entropy,
    entropy,
    reinforce,
    sum_components,
)
from rlightning.objectives.corrections import RolloutCorrection, approximate_proximal
from rlightning.objectives.kl import KLEstimator, estimate_kl, subtract_kl
from rlightning.objectives.policy import clipped_loss, sequence_log_ratio, token_log_ratio
from rlightning.objectives.returns import Returns, TurnBaseline, Turns, find_signal
from rlightning.objectives.zero_gradient import has_zero_gradient

__all__ = [
    "Aggregation",
    "CappedWeight",
    "ClippedSurrogate",
    "ForwardPass",
    "KLEstimator",
    "LossComponent",
    "PolicyObjective",
    "ReferenceKL",
    "Returns",
    "RolloutCorrection",
    "SoftGate",
    "TurnBaseline",
    "Turns",
    "aggregate",
    "approximate_proximal",
    "check_names",
    "clipped_loss",
    "cross_entropy",
    "entropy",
    "estimate_kl",
    "find_signal",
    "group_advantages",
    "has_signal",
    "has_zero_gradient",
    "leave_one_out",
    "overlong_penalty",
    "reinforce",
    "sequence_log_ratio",
    "subtract_kl",
    "sum_components",
    "token_log_ratio",
    "token_returns",
    "whiten",
]
