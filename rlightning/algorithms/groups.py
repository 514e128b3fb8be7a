"""The common base of algorithms that compare the completions of one prompt."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from rlightning.errors import ConfigError
from rlightning.module import RLModule
from rlightning.objectives import Returns, TurnBaseline, Turns, group_advantages
from rlightning.types import RolloutBatch


class GroupModule(RLModule):
    """An RLModule whose advantages compare the completions of a prompt; GRPO's advantages by default.

    A group with only one trajectory left, because the others failed, is left out.

    Args:
        model: see :class:`~rlightning.module.RLModule`, whose arguments are all accepted.
        turn_baseline: with ``turn_discount``, the returns with which a turn's return is compared: "group" for those of
            all turns of its group, "turn" for those of the same turn in the group's other trajectories, which must have
            the same number of turns (:meth:`~rlightning.objectives.Returns.of_turns`).
    """

    scale_by_std = True
    """Whether advantages are divided by the group's standard deviation."""

    def __init__(self, model: str | Path, *, turn_baseline: TurnBaseline = "group", **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        self.turn_baseline = turn_baseline

    def configure_callbacks(self) -> list[Callback]:
        """Return the module's callbacks; raise a ConfigError for a fit with fewer than two samples of a prompt."""
        if self.trainer.state.fn == "fit" and self.samples_per_prompt < 2:
            raise ConfigError(
                f"samples_per_prompt={self.samples_per_prompt}: {type(self).__name__} compares completions of one "
                "prompt with each other, and one alone teaches nothing. Use at least 2, such as 8."
            )
        return super().configure_callbacks()

    def keep_sequences(self, batch: RolloutBatch) -> Tensor:
        """Return which trajectories to train on: [M] bool, True in groups of two or more."""
        group = torch.unique(batch.group_ids, return_inverse=True)[1]
        return torch.bincount(group)[group] > 1

    def penalize_rewards(self, batch: RolloutBatch) -> Tensor:
        """Return the rewards minus each trajectory's KL: [M]; unchanged with ``turn_discount``, see :meth:`returns`."""
        if self.turn_discount is None:
            return super().penalize_rewards(batch)
        assert batch.rewards is not None
        return batch.rewards

    def returns(self, batch: RolloutBatch) -> Returns:
        """Return a group's rewards to compare, of trajectories or agents; with ``turn_discount``, turns' returns."""
        if self.turn_discount is None:
            return Returns.of_trajectories(batch)
        turns = Turns.of_batch(batch)
        if self.kl_coef and self.kl_placement == "reward":
            turns = turns._replace(rewards=turns.rewards - self.kl_coef * turns.sum_tokens(self.estimate_kl(batch)))
        return Returns.of_turns(batch, turns, self.turn_discount, self.turn_baseline)

    def compute_advantages(self, batch: RolloutBatch) -> Tensor:
        """Return each token's advantage: [T], the reward minus the group's mean, divided by its deviation if scaled."""
        returns = self.returns(batch)
        advantages = group_advantages(returns.values, returns.group_ids, scale_by_std=self.scale_by_std)
        return returns.to_tokens(batch, advantages)
