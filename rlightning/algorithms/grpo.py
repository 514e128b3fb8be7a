"""Group relative policy optimization."""

from pathlib import Path
from typing import Any

from torch import Tensor

from rlightning.algorithms.groups import GroupModule
from rlightning.algorithms.ranges import check_clip
from rlightning.objectives import Aggregation, clipped_loss, group_advantages, token_log_ratio
from rlightning.types import RolloutBatch


class GRPO(GroupModule):
    """GRPO (arXiv:2402.03300): a group's mean and standard deviation in place of a critic, and PPO's clip.

    With ``samples_per_prompt=64, prompts_per_step=16`` and one update that is the paper's section 4.2. The paper does
    not name its clip; 0.2 is PPO's.

    Args:
        model: see :class:`~rlightning.module.RLModule`, whose arguments are all taken.
        clip_low: the ratio counts down to ``1 - clip_low``.
        clip_high: the ratio counts up to ``1 + clip_high``.
        dual_clip: bounds the loss of negative advantages, see :func:`~rlightning.objectives.clipped_loss`.
        scale_by_std: whether to divide by the group's standard deviation.
        kl_coef: of the KL term, which is k3 in the loss. The paper's is 0.04; 0 needs no reference model.
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
        check_clip(clip_low, clip_high, dual_clip)
        super().__init__(model, kl_coef=kl_coef, loss_aggregation=loss_aggregation, **kwargs)
        self.clip_low, self.clip_high, self.dual_clip = clip_low, clip_high, dual_clip
        self.scale_by_std = scale_by_std

    def compute_advantages(self, batch: RolloutBatch) -> Tensor:
        """Rewards against their group's: [T]."""
        assert batch.rewards is not None
        return batch.to_tokens(group_advantages(batch.rewards, batch.group_ids, scale_by_std=self.scale_by_std))

    def policy_loss(self, logprobs: Tensor, batch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The clipped surrogate of each token: [T]."""
        assert batch.old_logprobs is not None and batch.advantages is not None
        return clipped_loss(
            token_log_ratio(logprobs, batch.old_logprobs),
            batch.advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )
