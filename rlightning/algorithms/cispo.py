"""Clipped importance sampling policy optimization."""

from pathlib import Path
from typing import Any

from torch import Tensor

from rlightning.algorithms.groups import GroupModule
from rlightning.errors import ConfigError
from rlightning.objectives import Aggregation, capped_weight_loss, group_advantages, token_log_ratio
from rlightning.types import RolloutBatch


class CISPO(GroupModule):
    """CISPO (MiniMax-M1, arXiv:2506.13585, eqs. 4 and 5): clip the importance weight, never the update.

    Every token keeps its gradient, so that rare tokens at which reasoning forks still learn in later updates.

    Args:
        model: see :class:`~rlightning.module.RLModule`, whose arguments are all taken.
        max_ratio: the largest weight, as an absolute value of the ratio. The paper's bound is ``1 + eps_high``
            with an ``eps_high`` that it tuned and does not tell; 5 is ScaleRL's (arXiv:2510.13786), which
            found 4, 5 and 8 alike.
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
        if not 0 <= min_ratio <= 1 <= max_ratio:
            raise ConfigError(
                f"min_ratio={min_ratio} and max_ratio={max_ratio} leave out a ratio of 1, that of an unchanged policy. "
                "They are absolute values: where others say eps_high 0.28, use max_ratio 1.28."
            )
        super().__init__(model, loss_aggregation=loss_aggregation, **kwargs)
        self.max_ratio, self.min_ratio = max_ratio, min_ratio

    def compute_advantages(self, batch: RolloutBatch) -> Tensor:
        """Rewards against their group's: [T]."""
        assert batch.rewards is not None
        return batch.to_tokens(group_advantages(batch.rewards, batch.group_ids))

    def policy_loss(self, logprobs: Tensor, batch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """REINFORCE of each token, weighted: [T]."""
        assert batch.old_logprobs is not None and batch.advantages is not None
        log_ratio = token_log_ratio(logprobs, batch.old_logprobs)
        return capped_weight_loss(
            logprobs, log_ratio, batch.advantages, max_ratio=self.max_ratio, min_ratio=self.min_ratio
        )
