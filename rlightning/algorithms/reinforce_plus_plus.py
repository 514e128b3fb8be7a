"""REINFORCE++, and its variant with a baseline."""

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rlightning.algorithms.groups import GroupModule
from rlightning.errors import ConfigError
from rlightning.module import RLModule
from rlightning.objectives import (
    ClippedSurrogate,
    KLEstimator,
    Returns,
    Turns,
    group_advantages,
    token_returns,
    whiten,
)
from rlightning.types import RolloutBatch


class REINFORCEPlusPlus(RLModule):
    """REINFORCE++ (arXiv:2501.03262): PPO without its critic, normalised over the whole batch instead of by group.

    A token's return is the reward minus the KL of this and all later tokens (eqs. 8 and 9). Returns are whitened over
    all tokens of the global batch (eq. 10), and used in PPO's clipped loss. No groups are needed: the paper samples one
    completion of each prompt.

    Args:
        model: see :class:`~rlightning.module.RLModule`, whose arguments are all accepted.
        clip_low: the ratio is clipped at ``1 - clip_low``.
        clip_high: the ratio is clipped at ``1 + clip_high``.
        discount: factor for later rewards, for each token.
        samples_per_prompt: completions of each prompt.
        kl_coef: weight of the KL, by default as in the authors' code.
        kl_estimator: k1, the log-ratio itself (eq. 9).
        kl_placement: the KL is subtracted from the reward, token by token.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        discount: float = 1.0,
        samples_per_prompt: int = 1,
        kl_coef: float = 0.01,
        kl_estimator: KLEstimator = "k1",
        kl_placement: Literal["loss", "reward"] = "reward",
        **kwargs: Any,
    ) -> None:
        if not 0 <= discount <= 1:
            raise ConfigError(f"discount={discount} must be in [0, 1]. Use 1.0 unless rewards come by the token.")
        super().__init__(
            model,
            samples_per_prompt=samples_per_prompt,
            kl_coef=kl_coef,
            kl_estimator=kl_estimator,
            kl_placement=kl_placement,
            **kwargs,
        )
        if self.turn_discount is not None and discount != 1:
            raise ConfigError(
                f"discount={discount} and turn_discount={self.turn_discount} both discount later rewards, the one by "
                "token, the other by turn. Give one of them."
            )
        self.policy_objective = ClippedSurrogate(clip_low=clip_low, clip_high=clip_high)
        self.discount = discount

    def penalize_rewards(self, batch: RolloutBatch) -> Tensor:
        """Return the rewards unchanged: [M]; :meth:`compute_advantages` subtracts the KL token by token."""
        assert batch.rewards is not None
        return batch.rewards

    def compute_advantages(self, batch: RolloutBatch) -> Tensor:
        """Return each token's discounted return, whitened over all ranks: [T]. Every rank must call it."""
        if self.turn_discount is not None:
            turns = Turns.of_batch(batch)
            returns = turns.to_tokens(turns.discount_rewards(self.turn_discount))
        else:
            # The reward comes with the last token of each branch.
            rewards = Returns.of_trajectories(batch)
            num_later = batch.to_tokens(batch.lengths, axis="N") - 1 - batch.position_ids
            returns = rewards.to_tokens(batch, rewards.values) * self.discount**num_later
        if self.kl_coef and self.kl_placement == "reward":
            kl = torch.where(batch.is_sampled, self.estimate_kl(batch), 0)
            returns = returns - self.kl_coef * token_returns(kl, batch.cu_seqlens, discount=self.discount)
        return whiten(returns, batch.is_sampled, self.all_sum)


class REINFORCEPlusPlusBaseline(GroupModule):
    """REINFORCE++ with a baseline (arXiv:2501.03262): rewards minus the group's mean, scaled by the batch's deviation.

    Unlike GRPO's scale, it does not depend on the few rewards of one group. Meant for tasks with verifiable rewards.

    Args:
        model: see :class:`~rlightning.module.RLModule`, whose arguments are all accepted.
        clip_low: the ratio is clipped at ``1 - clip_low``.
        clip_high: the ratio is clipped at ``1 + clip_high``.
        kl_coef: weight of the KL, by default as in the authors' code.
        kl_estimator: k2, whose gradient in the loss is that of the divergence.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        kl_coef: float = 1e-3,
        kl_estimator: KLEstimator = "k2",
        **kwargs: Any,
    ) -> None:
        super().__init__(model, kl_coef=kl_coef, kl_estimator=kl_estimator, **kwargs)
        self.policy_objective = ClippedSurrogate(clip_low=clip_low, clip_high=clip_high)

    def compute_advantages(self, batch: RolloutBatch) -> Tensor:
        """Return each token's reward minus its group's mean, whitened over all ranks: [T]. Every rank must call it."""
        returns = self.returns(batch)
        centred = returns.to_tokens(batch, group_advantages(returns.values, returns.group_ids, scale_by_std=False))
        return whiten(centred, batch.is_sampled, self.all_sum)
