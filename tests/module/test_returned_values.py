"""Overrides that return a list, an array, or the wrong number of values."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import make_algorithm, make_data, make_trainer

from rlightning.algorithms import GRPO
from rlightning.errors import ConfigError
from rlightning.types import RolloutBatch


class Listed(GRPO):
    """Rewards as a list of whole numbers, kept sequences as an array."""

    def compute_rewards(self, batch: RolloutBatch) -> Any:
        return [number % 2 for number in range(batch.num_sequences)]

    def keep_sequences(self, batch: RolloutBatch) -> Any:
        return np.ones(batch.num_sequences, bool)


class Short(GRPO):
    def compute_rewards(self, batch: RolloutBatch) -> Any:
        return [1.0]


class Worded(GRPO):
    def compute_rewards(self, batch: RolloutBatch) -> Any:
        return ["good"] * batch.num_sequences


class Nothing(GRPO):
    def compute_rewards(self, batch: RolloutBatch) -> Any:
        return None


class BySequence(Listed):
    def compute_advantages(self, batch: RolloutBatch) -> Any:
        return batch.rewards


class LossAlone(Listed):
    def policy_loss(self, logprobs: torch.Tensor, batch: RolloutBatch) -> Any:
        return -logprobs


class Averaged(Listed):
    def policy_loss(self, logprobs: torch.Tensor, batch: RolloutBatch) -> Any:
        return -logprobs.mean(), {}


def test_lists_and_arrays_train(model_folder: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, 1)
    trainer.fit(make_algorithm(Listed, model_folder), make_data(tmp_path))
    assert trainer.callback_metrics["reward/mean"] == 0.5  # 0 and 1 in turn
    assert trainer.callback_metrics["optim/skipped"] == 0


@pytest.mark.parametrize(
    ("algorithm", "line"),
    [
        (Short, r"^compute_rewards returned a tensor of the shape \[1\], and there are 8 trajectories"),
        (Worded, r"^compute_rewards returned \['good'.*, a list\. It has to return a tensor of 8 numbers"),
        (Nothing, r"^compute_rewards returned None, a NoneType\. It has to return a tensor of 8 numbers"),
        (BySequence, r"^compute_advantages returned a tensor of the shape \[8\], and there are \d+ tokens"),
        (LossAlone, r"^policy_loss returned a Tensor\. It has to return a pair"),
        (Averaged, r"^policy_loss returned a tensor of the shape \[\], and there are \d+ tokens"),
    ],
)
def test_wrong_returned_value_is_one_line(algorithm: type[GRPO], line: str, model_folder: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=line):
        make_trainer(tmp_path, 1).fit(make_algorithm(algorithm, model_folder), make_data(tmp_path))
