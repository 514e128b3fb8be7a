"""Dr. GRPO: GRPO without its length and difficulty biases."""

from pathlib import Path
from typing import Any

from rlightning.algorithms.groups import GroupModule
from rlightning.objectives import Aggregation, ClippedSurrogate


class DrGRPO(GroupModule):
    """Dr. GRPO (arXiv:2503.20783, section 3.2): GRPO without its two biases, and without KL.

    Rewards are not divided by the group's standard deviation, which favours prompts that are too easy or too hard; and
    losses are summed over a constant, the limit on completion tokens, instead of each completion's own length, which
    favours long wrong answers.

    Args:
        model: see :class:`~rlightning.module.RLModule`, whose arguments are all accepted.
        clip_low: the ratio is clipped at ``1 - clip_low``.
        clip_high: the ratio is clipped at ``1 + clip_high``.
        loss_aggregation: the paper's sum over a constant.
    """

    scale_by_std = False

    def __init__(
        self,
        model: str | Path,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        loss_aggregation: Aggregation = "constant",
        **kwargs: Any,
    ) -> None:
        super().__init__(model, loss_aggregation=loss_aggregation, **kwargs)
        self.policy_objective = ClippedSurrogate(clip_low=clip_low, clip_high=clip_high)
