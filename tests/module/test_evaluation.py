import math

import pytest
import torch
from tiny import make_batch

from rlightning.data import ValidationSet
from rlightning.module.evaluation import batch_metrics
from rlightning.rollout import Sampling
from rlightning.rollout.requests import validation_sampling


def test_evaluation_metrics_equal_hand_computed_values() -> None:
    # Two prompts with four completions each, of which 1 and 2 pass
    batch = make_batch([[[0], [3, 0], [3], [0]], [[4], [5, 6, 7, 0], [0], [0]]])
    batch.rewards = torch.tensor([1.0, 0.0, math.nan, 0.5, 1.0, 1.0, 0.5, 0.0])
    assert batch_metrics(batch, 4) == pytest.approx(
        {
            "reward": 4 / 8,
            "length": (1 + 2 + 1 + 1 + 1 + 4 + 1 + 1) / 8,
            "truncated": 2 / 8,
            "pass@1": (1 / 4 + 2 / 4) / 2,
            "pass@2": (3 / 6 + 5 / 6) / 2,
            "pass@4": 1.0,
        }
    )


def test_the_first_function_decides_what_passes() -> None:
    batch = make_batch([[[0]], [[0]], [[0]]])
    batch.rewards = torch.tensor([3.0, 0.2, 0.0])
    batch.scores = {"exact": torch.tensor([0.5, 1.0, math.nan]), "format": torch.tensor([1.0, 1.0, 1.0])}
    assert batch_metrics(batch, 1)["pass@1"] == pytest.approx(1 / 3)


def test_all_powers_of_two_up_to_the_samples() -> None:
    batch = make_batch([[[0]] * 6])
    batch.rewards = torch.zeros(6)
    assert [name for name in batch_metrics(batch, 6) if name.startswith("pass")] == ["pass@1", "pass@2", "pass@4"]


def test_a_rank_without_prompts_has_the_same_names() -> None:
    batch, nothing = make_batch([[[0], [0]]]), make_batch([])
    batch.rewards, nothing.rewards = torch.ones(2), torch.zeros(0)
    assert batch_metrics(nothing, 2) == dict.fromkeys(batch_metrics(batch, 2), 0.0)


def test_only_the_temperature_differs_from_training() -> None:
    training = Sampling(temperature=0.9, top_p=0.8, top_k=5, min_p=0.1, max_new_tokens=7, stop=("x",), seed=3)
    got = validation_sampling(training, ValidationSet("sums.jsonl").resolve("sums"))
    assert got == Sampling(temperature=0.0, top_p=0.8, top_k=5, min_p=0.1, max_new_tokens=7, stop=("x",), seed=3)
    got = validation_sampling(training, ValidationSet("sums.jsonl", samples_per_prompt=4).resolve("sums"))
    assert got.temperature == 1.0
