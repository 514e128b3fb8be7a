"""Soft adaptive policy optimization."""

from pathlib import Path
from typing import Any

from torch import Tensor

from rlightning.algorithms.groups import GroupModule
from rlightning.algorithms.ranges import check_positive
from rlightning.objectives import Aggregation, group_advantages, soft_gate_loss, token_log_ratio
from rlightning.types import RolloutBatch


class SAPO(GroupModule):
    """SAPO (arXiv:2511.20347): a sigmoid gate in place of the clip; off-policy tokens fade instead of dropping out.

    Args:
        model: see :class:`~rlightning.module.RLModule`, whose arguments are all taken.
        temperature_positive: how fast tokens with a positive advantage fade.
        temperature_negative: the same for the others, which spread over the whole vocabulary and so fade faster.
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
        check_positive("temperature_positive", temperature_positive)
        check_positive("temperature_negative", temperature_negative)
        super().__init__(model, loss_aggregation=loss_aggregation, **kwargs)
        self.temperature_positive, self.temperature_negative = temperature_positive, temperature_negative

    def compute_advantages(self, batch: RolloutBatch) -> Tensor:
        """Rewards against their group's: [T]."""
        assert batch.rewards is not None
        return batch.to_tokens(group_advantages(batch.rewards, batch.group_ids))

    def policy_loss(self, logprobs: Tensor, batch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The gated surrogate of each token: [T]."""
        assert batch.old_logprobs is not None and batch.advantages is not None
        return soft_gate_loss(
            token_log_ratio(logprobs, batch.old_logprobs),
            batch.advantages,
            temperature_positive=self.temperature_positive,
            temperature_negative=self.temperature_negative,
        )
