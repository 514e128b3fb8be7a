import math

import pytest
import torch
from tiny import make_batch
from torch import Tensor

from rlightning.module.metrics import RunningMeans, pass_at_k, rollout_metrics

NAN = float("nan")


def alone(tensor: Tensor) -> Tensor:
    """Return the sum over ranks for a run of one rank: the values themselves."""
    return tensor


def test_means_over_batches_of_unequal_size() -> None:
    means = RunningMeans()
    means.add({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([True, False])})
    means.add({"a": torch.tensor([6.0])})
    means.add_max("m", torch.tensor([-3.0, -2.0]))
    means.add_max("m", torch.tensor([-5.0]))
    means.add_max("m", torch.zeros(0))
    assert means.compute(alone, alone) == {"a": 3.0, "b": 0.5, "m": -2.0}


def test_masked_values_are_ignored_even_if_not_finite() -> None:
    means = RunningMeans()
    means.add({"a": torch.tensor([1.0, NAN, 5.0, math.inf])}, torch.tensor([True, False, True, False]))
    assert means.compute(alone, alone) == {"a": 3.0}


def test_means_of_nothing_are_zero() -> None:
    means = RunningMeans()
    assert means.compute(alone, alone) == {}
    means.add({"a": torch.zeros(0)})
    assert means.compute(alone, alone) == {"a": 0.0}


def test_ranks_are_weighed_by_their_counts() -> None:
    other = torch.tensor([[10.0], [4.0]], dtype=torch.float64)
    means = RunningMeans()
    means.add({"a": torch.tensor([5.0])})
    assert means.compute(lambda table: table + other, alone) == {"a": 3.0}


def test_rollout_metrics_by_hand() -> None:
    # Three groups: rewards 1 and 0 and one failed; 2 and 2; both failed
    batch = make_batch([[[0], [3, 0], [3, 3]], [[4], [5, 6, 7, 0]], [[0], [0]]])
    batch.rewards = torch.tensor([1.0, 0.0, NAN, 2.0, 2.0, NAN, NAN])
    batch.scores = {"exact": torch.tensor([1.0, 0.0, NAN, 1.0, 1.0, NAN, NAN])}
    assert rollout_metrics(batch, alone, alone) == pytest.approx(
        {
            "reward/mean": 5 / 4,
            "reward/std": math.sqrt((1 + 4 + 4) / 4 - 25 / 16),
            "reward/no_signal": 1 / 2,
            "reward/failed": 3 / 7,
            "reward/exact": 3 / 4,
            "completion/length": (1 + 2 + 2 + 1 + 4 + 1 + 1) / 7,
            "completion/length_max": 4,
            "completion/truncated": 2 / 7,
        }
    )


def test_one_group_without_spread_has_no_signal() -> None:
    batch = make_batch([[[0], [0]]])
    batch.rewards = torch.tensor([0.5, 0.5])
    metrics = rollout_metrics(batch, alone, alone)
    assert (metrics["reward/mean"], metrics["reward/std"], metrics["reward/no_signal"]) == (0.5, 0.0, 1.0)


def test_signal_is_of_the_compared_rewards() -> None:
    batch = make_batch([[[0], [0]], [[3], [3]]])
    batch.rewards = torch.tensor([0.5, 0.25, 1.0, 0.0])
    compared = torch.tensor([0.5, 0.5, 1.0, 0.0])  # without the penalty of the second
    assert rollout_metrics(batch, alone, alone)["reward/no_signal"] == 0.0
    assert rollout_metrics(batch, alone, alone, compared=compared)["reward/no_signal"] == 0.5


def test_all_failed_rewards_give_zero_means() -> None:
    batch = make_batch([[[0], [0]], [[3]]])
    batch.rewards = torch.full((3,), NAN)
    metrics = rollout_metrics(batch, alone, alone)
    assert metrics["reward/failed"] == 1.0
    assert metrics["reward/mean"] == metrics["reward/std"] == metrics["reward/no_signal"] == 0.0


def test_a_large_mean_does_not_swallow_the_deviation() -> None:
    batch = make_batch([[[0]] * 4])
    batch.rewards = torch.tensor([10000.0, 10001.0, 10000.0, 10001.0])
    assert rollout_metrics(batch, alone, alone)["reward/std"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("samples", "passed", "k", "expected"),
    [(4, 0, 2, 0.0), (4, 4, 1, 1.0), (4, 1, 1, 1 / 4), (4, 1, 2, 1 / 2), (4, 2, 2, 5 / 6), (4, 3, 2, 1.0)],
)
def test_pass_at_k_equals_hand_computed_value(samples: int, passed: int, k: int, expected: float) -> None:
    assert pass_at_k(samples, passed, k) == pytest.approx(expected)
