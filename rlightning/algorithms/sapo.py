"""Soft adaptive policy optimization."""

from pathlib import Path
from typing import Any

from rlightning.algorithms.groups import GroupModule
from rlightning.objectives import Aggregation, SoftGate


class SAPO(GroupModule):
    """SAPO (arXiv:2511.20347): a sigmoid gate in place of the clip, so that off-policy tokens lose gradient gradually.

    Args:
        model: see :class:`~rlightning.module.RLModule`, whose arguments are all accepted.
        temperature_positive: how fast the gradient of tokens with a positive advantage decays off-policy.
        temperature_negative: the same for other tokens, whose gradient affects the whole vocabulary; larger is faster.
        loss_aggregation: the paper's mean of the sequences' means (eq. 5).
    """

    def __init__(
        self,
        model: str | Path,
        *,
        temperature_positive: float = 1.0,
        temperature_negative: float = 1.05,
        loss_aggregation: Aggregation = "trajectory_mean",
        **kwargs: Any,
    ) -> None:
        super().__init__(model, loss_aggregation=loss_aggregation, **kwargs)
        self.policy_objective = SoftGate(
            temperature_positive=temperature_positive, temperature_negative=temperature_negative
        )
