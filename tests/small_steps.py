"""A few steps of a tiny model from which all weights move, and their comparison."""

from pathlib import Path
from typing import Any

import torch
from tiny import copy_weights, make_data, make_trainer, share_of_ones
from torch import Tensor

from rlightning.algorithms import GRPO
from rlightning.hooks import RLCallback
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


def weight_lists(module: RLModule) -> dict[str, list[Any]]:
    """The weights as JSON has them, to the bit."""
    return {name: weight.tolist() for name, weight in copy_weights(module).items()}


def as_tensors(lists: dict[str, list[Any]]) -> Weights:
    """In float64, what :func:`weight_lists` gave."""
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in lists.items()}


def assert_close(got: Weights, expected: Weights, tolerance: float = 0.0) -> None:
    """Each weight, to so much."""
    for name, weight in expected.items():
        torch.testing.assert_close(got[name], weight, atol=tolerance, rtol=0.0)


class ComputesAll(GRPO):
    """Computes sequences without advantage, too."""

    def skippable_sequences(self, batch: RolloutBatch) -> Tensor:
        return torch.zeros(batch.num_sequences, dtype=torch.bool)


def matrices_and_vectors(module: RLModule) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """The actor's parameters by shape, for two optimizers."""
    parameters = list(module.loaded_actor.parameters())
    return [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim == 1]


def two_optimizers(module: RLModule) -> tuple[torch.optim.SGD, torch.optim.AdamW]:
    """One for matrices, another one for norms."""
    matrices, norms = matrices_and_vectors(module)
    return torch.optim.SGD(matrices, lr=0.1), torch.optim.AdamW(norms, lr=1e-3)


class StepMetrics(RLCallback):
    """Notes the metrics of each step."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def column(self, name: str) -> list[float]:
        """One metric's values, a step each."""
        return [metrics[name] for metrics in self.metrics]

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        """Called when a step has logged its metrics."""
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})
