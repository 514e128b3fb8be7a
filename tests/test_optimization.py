import logging
import math
import re
from typing import Any

import pytest
import torch
from torch import nn

from rlightning.errors import ConfigError
from rlightning.optimization import (
    check_optimizer,
    clip_gradients,
    make_lr_schedule,
    make_optimizer,
)


def make_parameters() -> tuple[nn.Parameter, nn.Parameter]:
    return nn.Parameter(torch.full((2, 2), 2.0)), nn.Parameter(torch.full((2,), 2.0))


def test_only_matrices_decay() -> None:
    matrix, bias = make_parameters()
    optimizer = make_optimizer([matrix, bias], lr=0.1, weight_decay=0.5, betas=(0.9, 0.999))
    matrix.grad, bias.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()
    assert matrix.tolist() == [[pytest.approx(2.0 * (1 - 0.1 * 0.5))] * 2] * 2
    assert bias.tolist() == [2.0, 2.0]


def test_frozen_parameters_are_left_out() -> None:
    matrix, bias = make_parameters()
    bias.requires_grad_(False)
    optimizer = make_optimizer([matrix, bias], lr=0.1, weight_decay=0.0, betas=(0.9, 0.999))
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 0]


@pytest.mark.parametrize(
    ("schedule", "warmup", "max_steps", "factors"),
    [
        ("constant", 0, -1, [1, 1, 1, 1]),
        ("constant", 3, -1, [1 / 3, 2 / 3, 1, 1]),
        ("linear", 0, 4, [1, 3 / 4, 2 / 4, 1 / 4, 0, 0]),
        ("linear", 2, 4, [1 / 2, 1, 1, 1 / 2, 0]),
        ("cosine", 0, 4, [1, (1 + 0.5**0.5) / 2, 1 / 2, (1 - 0.5**0.5) / 2, 0, 0]),
    ],
)
def test_lr_schedule(schedule: Any, warmup: int, max_steps: int, factors: list[float]) -> None:
    optimizer = make_optimizer(make_parameters(), lr=0.5, weight_decay=0.0, betas=(0.9, 0.999))
    scheduler = make_lr_schedule(optimizer, schedule, warmup_steps=warmup, max_steps=max_steps)
    seen = []
    for _ in factors:
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert seen == pytest.approx([0.5 * factor for factor in factors])


@pytest.mark.parametrize(("schedule", "max_steps"), [("linear", -1), ("cosine", 5)])
def test_a_schedule_needs_an_end(schedule: Any, max_steps: int) -> None:
    optimizer = make_optimizer(make_parameters(), lr=0.5, weight_decay=0.0, betas=(0.9, 0.999))
    with pytest.raises(
        ConfigError, match=rf"lr_schedule='{schedule}' .* warmup_steps=5, .* trainer\.max_steps={max_steps}"
    ):
        make_lr_schedule(optimizer, schedule, warmup_steps=5, max_steps=max_steps)


def test_gradients_are_scaled_to_the_norm() -> None:
    matrix, bias = make_parameters()
    matrix.grad = torch.tensor([[3.0, 0.0], [0.0, 0.0]])
    bias.grad = torch.tensor([0.0, 4.0])
    norm, is_finite = clip_gradients([matrix, bias], 1.0)
    assert norm.item() == 5.0 and is_finite
    assert matrix.grad[0, 0].item() == pytest.approx(0.6) and bias.grad[1].item() == pytest.approx(0.8)


def test_small_gradients_stay() -> None:
    matrix, bias = make_parameters()
    matrix.grad = torch.full((2, 2), 0.1)
    norm, is_finite = clip_gradients([matrix, bias], 1.0)
    assert norm.item() == pytest.approx(0.2) and is_finite
    assert torch.equal(matrix.grad, torch.full((2, 2), 0.1))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(value: float, caplog: pytest.LogCaptureFixture) -> None:
    matrix, bias = make_parameters()
    optimizer = make_optimizer([matrix, bias], lr=0.1, weight_decay=0.5, betas=(0.9, 0.999))
    matrix.grad, bias.grad = torch.ones(2, 2), torch.tensor([1.0, value])
    with caplog.at_level(logging.WARNING):
        norm, is_finite = clip_gradients([matrix, bias], 1.0)
    assert not is_finite and not norm.isfinite()
    assert "this optimizer step is skipped" in caplog.text
    optimizer.step()
    assert (matrix == 2.0).all() and (bias == 2.0).all()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"lr": -1.0}, r"lr=-1\.0 must be at least 0\. Try 1e-6\."),
        ({"lr": math.nan}, "lr=nan must be at least 0"),
        ({"weight_decay": -0.1}, r"weight_decay=-0\.1 must be at least 0"),
        ({"betas": (0.9, 1.5)}, r"betas=\[0\.9, 1\.5\] must be in \[0, 1\)"),
        ({"warmup_steps": -3}, "warmup_steps=-3 must be at least 0"),
        ({"max_grad_norm": 0.0}, r"max_grad_norm=0\.0 must be above 0\. Use \.inf for no limit\."),
    ],
)
def test_numbers_with_which_nothing_is_learned(setting: dict[str, Any], message: str) -> None:
    usual: dict[str, Any] = {"lr": 1e-6, "weight_decay": 0.0, "betas": (0.9, 0.999), "warmup_steps": 0}
    check_optimizer(**usual, max_grad_norm=math.inf)
    with pytest.raises(ConfigError, match=message):
        check_optimizer(**usual | {"max_grad_norm": 1.0} | setting)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("quantised", "Choose from: 8bit, bfloat16, float32"), ("bf16", "Did you mean 'bfloat16'?")],
)
def test_unknown_optimizer_states(name: Any, hint: str) -> None:
    usual: dict[str, Any] = {"lr": 1e-6, "weight_decay": 0.0, "betas": (0.9, 0.999), "warmup_steps": 0}
    with pytest.raises(ConfigError, match=re.escape(f"optimizer_states='{name}' is unknown. {hint}")):
        check_optimizer(**usual, max_grad_norm=1.0, optimizer_states=name)
