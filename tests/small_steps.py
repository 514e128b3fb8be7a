"""A few steps of a tiny model from which all weights move, and their comparison."""

from pathlib import Path
from typing import Any

import torch
from tiny import copy_weights, make_data, make_trainer, share_of_ones
from torch import Tensor

from rlightning.algorithms import GRPO
from rlightning.module import RLModule
from rlightning.rewards import RewardFunction
from rlightning.types import RolloutBatch

Weights = dict[str, Tensor]
SMALL: dict[str, Any] = {"prompts_per_step": 4, "samples_per_prompt": 4, "lr": 1e-3}
REWARDS = (RewardFunction(share_of_ones),)


def train(module: RLModule, folder: Path, max_steps: int, *callbacks: Any, **kwargs: Any) -> Weights:
    """The weights after some steps."""
    make_trainer(folder, max_steps, *callbacks, **kwargs).fit(module, make_data(folder))
    return copy_weights(module)


def assert_close(got: Weights, expected: Weights, tolerance: float = 0.0) -> None:
    """Each weight, to so much."""
    for name, weight in expected.items():
        torch.testing.assert_close(got[name], weight, atol=tolerance, rtol=0.0)


class ComputesAll(GRPO):
    """Computes sequences without advantage, too."""

    def skippable_sequences(self, batch: RolloutBatch) -> Tensor:
        return torch.zeros(batch.num_sequences, dtype=torch.bool)
