"""Group relative policy optimization."""

from pathlib import Path
from typing import Any

from rlightning.algorithms.groups import GroupModule
from rlightning.objectives import Aggregation, ClippedSurrogate


class GRPO(GroupModule):
    """GRPO (arXiv:2402.03300): PPO's clip, with a group's mean and standard deviation in place of a critic.

    With ``samples_per_prompt=64, prompts_per_step=16`` and one update, the settings are those of the paper's section
    4.2. The paper does not give its clip range; 0.2 is PPO's.

    Args:
        model: see :class:`~rlightning.module.RLModule`, whose arguments are all accepted.
        clip_low: the ratio is clipped at ``1 - clip_low``.
        clip_high: the ratio is clipped at ``1 + clip_high``.
        dual_clip: bounds the loss of negative advantages, see :func:`~rlightning.objectives.clipped_loss`.
        scale_by_std: whether to divide by the group's standard deviation.
        kl_coef: weight of the KL term, which is k3 in the loss. The paper's is 0.04; 0 needs no reference model.
        loss_aggregation: the paper's mean of the sequences' means.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        scale_by_std: bool = True,
        kl_coef: float = 0.0,
        loss_aggregation: Aggregation = "trajectory_mean",
        **kwargs: Any,
    ) -> None:
        super().__init__(model, kl_coef=kl_coef, loss_aggregation=loss_aggregation, **kwargs)
        self.policy_objective = ClippedSurrogate(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
        self.scale_by_std = scale_by_std
