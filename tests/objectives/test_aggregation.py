import pytest
import torch
from torch import Tensor

from rlightning.objectives import Aggregation, aggregate
from rlightning.types import LossTotals


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(loss.sum(), of)[0]


KINDS: list[Aggregation] = ["token_mean", "turn_mean", "sequence_mean", "trajectory_mean", "constant"]

# Two sequences: a prompt token and completion losses 1, 2, 3; a prompt token and a completion loss of 8.
VALUES = torch.tensor([50.0, 1.0, 2.0, 3.0, 60.0, 8.0])
MASK = torch.tensor([False, True, True, True, False, True])
CU_SEQLENS = torch.tensor([0, 4, 6], dtype=torch.int32)
LENGTHS = torch.tensor([3, 3, 3, 3, 1, 1])
TURNS = torch.tensor([-1, 0, 0, 0, -1, 0])
GROUP = torch.full((6,), 4)
"""Sampled tokens of both together."""


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token_mean", (1 + 2 + 3 + 8) / 4),
        ("turn_mean", ((1 + 2 + 3) / 3 + 8) / 2),
        ("sequence_mean", ((1 + 2 + 3) / 3 + 8) / 2),
        ("trajectory_mean", ((1 + 2 + 3) / 3 + 8) / 2),
        ("group_mean", (1 + 2 + 3 + 8) / 4),
        ("constant", (1 + 2 + 3 + 8) / (2 * 10)),
    ],
)
def test_aggregate_equals_hand_computed_loss(kind: Aggregation, expected: float) -> None:
    lengths: dict[str, Tensor] = {"turn_ids": TURNS, "trajectory_lengths": LENGTHS, "group_lengths": GROUP}
    result = aggregate(VALUES, MASK, CU_SEQLENS, kind, LossTotals(4, 2, 2, 1, 2), **lengths, constant=10.0)
    torch.testing.assert_close(result, torch.tensor(expected))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_masked_counts_for_nothing(kind: Aggregation) -> None:
    values = torch.where(MASK, VALUES, torch.nan).requires_grad_()
    lengths: dict[str, Tensor] = {"turn_ids": TURNS, "trajectory_lengths": LENGTHS}
    loss = aggregate(values, MASK, CU_SEQLENS, kind, LossTotals(4, 2, 2, 1, 2), **lengths, constant=10.0)
    grad = gradient(loss, values)
    assert torch.isfinite(loss)
    assert torch.equal(grad[~MASK], torch.zeros(2))


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_reduced_in_float32(kind: Aggregation) -> None:
    values = torch.ones(4096, dtype=torch.bfloat16)
    mask = torch.ones(4096, dtype=torch.bool)
    lengths = torch.tensor([4000, 96]).repeat_interleave(torch.tensor([4000, 96]))
    totals, bounds = LossTotals(4096, 2, 2, 2, 2), torch.tensor([0, 4000, 4096])
    turns = torch.zeros(4096, dtype=torch.int32)
    loss = aggregate(values, mask, bounds, kind, totals, turn_ids=turns, trajectory_lengths=lengths, constant=2048.0)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, torch.tensor(1.0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_without_completion_adds_nothing(kind: Aggregation) -> None:
    mask = torch.tensor([False, False, False, False, False, True])
    lengths, totals = torch.tensor([0, 0, 0, 0, 1, 1]), LossTotals(1, 2, 2, 2, 2)
    own: dict[str, Tensor] = {"turn_ids": TURNS, "trajectory_lengths": lengths}
    loss = aggregate(VALUES, mask, CU_SEQLENS, kind, totals, **own, constant=8.0)
    expected: dict[Aggregation, float] = {"token_mean": 8.0, "constant": 8.0 / (2 * 8)}
    torch.testing.assert_close(loss, torch.tensor(expected.get(kind, 8.0 / 2)))


@pytest.mark.parametrize("kind", KINDS)
def test_no_sequences_at_all_is_zero(kind: Aggregation) -> None:
    nothing: Tensor = torch.zeros(0)
    totals, bounds = LossTotals(0, 0, 0, 0, 0), torch.tensor([0])
    own = {"turn_ids": nothing, "trajectory_lengths": nothing}
    loss = aggregate(nothing, nothing.bool(), bounds, kind, totals, **own, constant=8.0)
    assert loss.item() == 0.0


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token_mean", (1 + 2 + 3 + 8) / 4),
        ("turn_mean", (1 + (2 + 3) / 2 + 8) / 3),
        ("sequence_mean", ((1 + 2 + 3) / 3 + 8) / 2),
        ("trajectory_mean", (1 + 2 + 3 + 8) / 4),
        ("group_mean", (1 + 2 + 3 + 8) / 4),
        ("constant", (1 + 2 + 3 + 8) / 10),
    ],
)
def test_a_trajectory_of_two_branches_weighs_as_one(kind: Aggregation, expected: float) -> None:
    totals = LossTotals(4, 2, 1, 1, 3)
    turns = torch.tensor([-1, 0, 2, 2, 2, 4])  # the second one's history ends with a token of the turn before
    lengths: dict[str, Tensor] = {"turn_ids": turns, "trajectory_lengths": GROUP, "group_lengths": GROUP}
    result = aggregate(VALUES, MASK, CU_SEQLENS, kind, totals, **lengths, constant=10.0)
    torch.testing.assert_close(result, torch.tensor(expected))
