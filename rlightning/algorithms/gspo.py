"""Group sequence policy optimization."""

from pathlib import Path
from typing import Any

from torch import Tensor

from rlightning.algorithms.groups import GroupModule
from rlightning.algorithms.ranges import check_clip
from rlightning.objectives import Aggregation, clipped_loss, group_advantages, sequence_log_ratio
from rlightning.types import RolloutBatch


class GSPO(GroupModule):
    """GSPO (arXiv:2507.18071): one ratio a sequence, the geometric mean of its tokens', clipped as a whole.

    The ratio is a mean over tokens, so its bounds are a thousandth of GRPO's. They matter from the second update on a
    rollout; the paper makes four (``updates_per_rollout=4``).

    Args:
        model: see :class:`~rlightning.module.RLModule`, whose arguments are all taken.
        clip_low: the ratio counts down to ``1 - clip_low`` (section 5.1).
        clip_high: the ratio counts up to ``1 + clip_high`` (section 5.1).
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
        check_clip(clip_low, clip_high)
        super().__init__(model, loss_aggregation=loss_aggregation, **kwargs)
        self.clip_low, self.clip_high = clip_low, clip_high

    def compute_advantages(self, batch: RolloutBatch) -> Tensor:
        """Rewards against their group's: [T]."""
        assert batch.rewards is not None
        return batch.to_tokens(group_advantages(batch.rewards, batch.group_ids))

    def policy_loss(self, logprobs: Tensor, batch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The clipped surrogate of each token's sequence: [T]."""
        assert batch.old_logprobs is not None and batch.advantages is not None
        log_ratio = sequence_log_ratio(logprobs, batch.old_logprobs, batch.is_sampled, batch.cu_seqlens)
        return clipped_loss(log_ratio, batch.advantages, clip_low=self.clip_low, clip_high=self.clip_high)
