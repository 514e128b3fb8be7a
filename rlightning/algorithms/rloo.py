"""REINFORCE leave-one-out."""

from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from rlightning.algorithms.groups import GroupModule
from rlightning.errors import ConfigError
from rlightning.objectives import Aggregation, KLEstimator, leave_one_out, reinforce
from rlightning.types import RolloutBatch


class RLOO(GroupModule):
    """RLOO (arXiv:2402.14740): plain policy gradient, with the mean reward of a group's other completions as baseline.

    A completion is one action: its KL is subtracted from its reward, and its tokens' losses are summed. The sum is
    divided by a constant, the limit on completion tokens, so that learning rates and gradient norms are comparable with
    those of other algorithms.

    Args:
        model: see :class:`~rlightning.module.RLModule`, whose arguments are all accepted.
        samples_per_prompt: the paper's larger ``k``.
        kl_coef: weight of the KL, by default the paper's for summarization.
        kl_estimator: k1, the log-ratio itself.
        kl_placement: the KL is subtracted from the reward.
        loss_aggregation: the sum divided by a constant.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        samples_per_prompt: int = 4,
        kl_coef: float = 0.03,
        kl_estimator: KLEstimator = "k1",
        kl_placement: Literal["loss", "reward"] = "reward",
        loss_aggregation: Aggregation = "constant",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            model,
            samples_per_prompt=samples_per_prompt,
            kl_coef=kl_coef,
            kl_estimator=kl_estimator,
            kl_placement=kl_placement,
            loss_aggregation=loss_aggregation,
            **kwargs,
        )
        self.policy_objective = reinforce
        if self.plan.optimizer_steps > 1:
            raise ConfigError(
                f"updates_per_rollout={self.plan.updates_per_rollout} x epochs_per_rollout="
                f"{self.plan.epochs_per_rollout}: RLOO's gradient is right for one update a rollout only, which is on "
                "policy. Use 1 of each, or DrGRPO, which is RLOO with a clipped ratio."
            )

    def compute_advantages(self, batch: RolloutBatch) -> Tensor:
        """Return each token's advantage: [T], its completion's reward minus the mean of the group's others."""
        returns = self.returns(batch)
        advantages = leave_one_out(returns.values, returns.group_ids, returns.trajectory_ids)
        return returns.to_tokens(batch, advantages)
