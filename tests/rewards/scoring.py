"""Runners of reward functions, and what they score."""

import math
from collections.abc import Callable
from typing import Any

import torch

from rlightning.rewards import RewardRunner, RewardScores
from rlightning.types import Prompt, Sample, Trajectory

MakeRunner = Callable[..., RewardRunner]


def make_trajectories(completions: list[str], **columns: list[Any]) -> list[Trajectory]:
    rows = [{name: values[i] for name, values in columns.items()} for i in range(len(completions))]
    return [
        Trajectory.single_turn(Prompt(i, f"prompt {i}", [1], row), Sample(range(len(text)), [], [], text, "stop"))
        for i, (row, text) in enumerate(zip(rows, completions, strict=True))
    ]


def score(runner: RewardRunner, completions: list[str], **columns: list[Any]) -> RewardScores:
    return runner.score(make_trajectories(completions, **columns))


def values(tensor: torch.Tensor) -> list[float | None]:
    return [None if math.isnan(value) else value for value in tensor.tolist()]
