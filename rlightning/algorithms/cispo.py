"""Clipped importance sampling policy optimization."""

from pathlib import Path
from typing import Any

from rlightning.algorithms.groups import GroupModule
from rlightning.objectives import Aggregation, CappedWeight


class CISPO(GroupModule):
    """CISPO (MiniMax-M1, arXiv:2506.13585, eqs. 4 and 5): clips the importance weight, so that no token loses its
    gradient.

    Rare tokens that start a new line of reasoning therefore keep their gradient in later updates.

    Args:
        model: see :class:`~rlightning.module.RLModule`, whose arguments are all accepted.
        max_ratio: the largest weight, as an absolute value of the ratio. The paper's bound is ``1 + eps_high`` with an
            unpublished ``eps_high``; 5 is from ScaleRL (arXiv:2510.13786), which found 4, 5 and 8 equally good.
        min_ratio: the smallest weight; 0 is the paper's "no lower bound".
        loss_aggregation: the paper's mean over all tokens.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        max_ratio: float = 5.0,
        min_ratio: float = 0.0,
        loss_aggregation: Aggregation = "token_mean",
        **kwargs: Any,
    ) -> None:
        super().__init__(model, loss_aggregation=loss_aggregation, **kwargs)
        self.policy_objective = CappedWeight(max_ratio=max_ratio, min_ratio=min_ratio)
