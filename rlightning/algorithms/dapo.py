"""Decoupled clip and dynamic sampling policy optimization."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlightning.algorithms.groups import GroupModule
from rlightning.errors import ConfigError
from rlightning.objectives import Aggregation, ClippedSurrogate, find_signal, overlong_penalty
from rlightning.types import RolloutBatch

OVERLONG = "overlong"


class DAPO(GroupModule):
    """DAPO (arXiv:2503.14476): GRPO without KL, with clip-higher, dynamic sampling, token-level loss, overlong penalty.

    - Clip-higher (eq. 10): the upper bound is 0.28, the lower stays 0.2.
    - Dynamic sampling (eq. 11): groups whose rewards, without the overlong penalty, are all equal are replaced by new
      prompts, up to ``max_refills`` times a step.
    - Token-level loss (eq. 12): the mean over the tokens of the global batch.
    - Soft overlong punishment (eq. 13), which :meth:`compute_rewards` adds; it is logged as ``reward/overlong``.

    The paper has ``prompts_per_step=512, samples_per_prompt=16, updates_per_rollout=16, warmup_steps=20``.

    Args:
        model: see :class:`~rlightning.module.RLModule`, whose arguments are all accepted.
        clip_low: the ratio is clipped at ``1 - clip_low``.
        clip_high: the ratio is clipped at ``1 + clip_high``.
        max_refills: maximum number of refills of a step; 0 drops groups without replacing them.
        overlong_cache: number of completion tokens before the run's or the prompt's limit over which the penalty falls
            to -1; None for a fifth of the limit, as the paper's 4,096 of 20,480; 0 for no penalty.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        max_refills: int = 10,
        overlong_cache: int | None = None,
        loss_aggregation: Aggregation = "token_mean",
        **kwargs: Any,
    ) -> None:
        if max_refills < 0 or (overlong_cache or 0) < 0:
            raise ConfigError(f"max_refills={max_refills} and overlong_cache={overlong_cache} must be at least 0.")
        super().__init__(model, loss_aggregation=loss_aggregation, **kwargs)
        self.policy_objective = ClippedSurrogate(clip_low=clip_low, clip_high=clip_high)
        self.max_refills = max_refills
        self.overlong_cache = overlong_cache

    def compute_rewards(self, batch: RolloutBatch) -> Tensor:
        """Return the rewards plus the overlong penalty, which is also put into ``batch.scores``: [M]."""
        rewards = super().compute_rewards(batch)
        limit = self.sampling.max_new_tokens
        cache = limit // 5 if self.overlong_cache is None else self.overlong_cache
        if cache > limit:
            raise ConfigError(
                f"overlong_cache={cache} is longer than rollout.max_new_tokens={limit}. Use less, or 0 for no penalty."
            )
        if cache == 0:
            return rewards
        limits = torch.tensor([self.sampling.of(prompt).max_new_tokens for prompt in batch.prompts])
        caches = limits // 5 if self.overlong_cache is None else limits.clamp(max=cache)
        penalty = overlong_penalty(batch.completion_lengths, limits, caches).to(rewards.device)
        batch.scores[OVERLONG] = penalty
        return rewards + penalty

    def keep_sequences(self, batch: RolloutBatch) -> Tensor:
        """Return which trajectories to train on: [M] bool, True in groups whose rewards before the penalty differ."""
        return find_signal(batch, self.compared_rewards(batch))

    def compared_rewards(self, batch: RolloutBatch) -> Tensor:
        """Return the rewards without the overlong penalty, by which dynamic sampling compares a group: [M]."""
        penalty = batch.scores.get(OVERLONG)
        rewards = super().compared_rewards(batch)
        return rewards if penalty is None else rewards - penalty
