"""Group sequence policy optimization."""

from pathlib import Path
from typing import Any

from rlightning.algorithms.groups import GroupModule
from rlightning.objectives import Aggregation, ClippedSurrogate


class GSPO(GroupModule):
    """GSPO (arXiv:2507.18071): one clipped ratio for each sequence, the geometric mean of its tokens' ratios.

    Since the ratio is a mean over tokens, its bounds are about a thousandth of GRPO's. They have an effect from the
    second update of a rollout on; the paper makes four (``updates_per_rollout=4``).

    Args:
        model: see :class:`~rlightning.module.RLModule`, whose arguments are all accepted.
        clip_low: the ratio is clipped at ``1 - clip_low`` (section 5.1).
        clip_high: the ratio is clipped at ``1 + clip_high`` (section 5.1).
        loss_aggregation: the paper's mean over sequences (eq. 5).
    """

    def __init__(
        self,
        model: str | Path,
        *,
        clip_low: float = 3e-4,
        clip_high: float = 4e-4,
        loss_aggregation: Aggregation = "trajectory_mean",
        **kwargs: Any,
    ) -> None:
        super().__init__(model, loss_aggregation=loss_aggregation, **kwargs)
        self.policy_objective = ClippedSurrogate(clip_low=clip_low, clip_high=clip_high, level="sequence")
