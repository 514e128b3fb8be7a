"""Metrics of a training step, reduced over micro-batches and ranks. docs/metrics.md explains them."""

from collections.abc import Callable, Mapping
from math import comb
from typing import get_args

import torch
from torch import Tensor

from rlightning.objectives import find_signal
from rlightning.types import BranchReason, RolloutBatch

BRANCHES = "environment/branches/"
REASONS = [reason for reason in get_args(BranchReason) if reason != "start"]
Reduce = Callable[[Tensor], Tensor]
"""A function that sums a tensor over the ranks, or takes its maximum."""


class RunningMeans:
    """Accumulates means and maxima of metrics over micro-batches and ranks; values stay on the device until
    :meth:`compute`.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, values: Mapping[str, Tensor], mask: Tensor | None = None) -> None:
        """Add values, each [T] or [M], by metric name; only those that ``mask`` selects, if given."""
        for name, value in values.items():
            chosen = value.double() if mask is None else torch.where(mask, value.double(), 0)
            count = chosen.new_full((), value.numel()) if mask is None else mask.sum()
            self.add_share(name, chosen.sum(), count)

    def add_share(self, name: str, part: Tensor, whole: Tensor) -> None:
        """Add a numerator and a denominator, both scalars; the metric is the quotient of both sums."""
        self._sums[name] = self._sums.get(name, 0) + part.double()
        self._counts[name] = self._counts.get(name, 0) + whole

    @torch.no_grad()
    def add_max(self, name: str, values: Tensor) -> None:
        """Add values of a metric that reports only the largest one."""
        largest = torch.cat([values.float().flatten(), values.new_full((1,), -torch.inf, dtype=torch.float32)]).max()
        self._maxima[name] = torch.maximum(self._maxima[name], largest) if name in self._maxima else largest

    def compute(self, all_sum: Reduce, all_max: Reduce) -> dict[str, float]:
        """Return means and maxima over all ranks by metric name. Every rank must call it, with the same names."""
        result: dict[str, float] = {}
        if self._sums:
            table = torch.stack(
                [torch.stack(list(self._sums.values())), torch.stack(list(self._counts.values())).double()]
            )
            sums, counts = all_sum(table).tolist()
            result = {name: s / max(c, 1.0) for name, s, c in zip(self._sums, sums, counts, strict=True)}
        if self._maxima:
            maxima = all_max(torch.stack(list(self._maxima.values()))).tolist()
            result |= dict(zip(self._maxima, maxima, strict=True))
        return result


def rollout_metrics(
    batch: RolloutBatch, all_sum: Reduce, all_max: Reduce, *, compared: Tensor | None = None
) -> dict[str, float]:
    """Return a rollout's metrics of rewards, learning signal, lengths and branches, over all ranks; every rank must
    call it. A NaN reward counts as failed.

    Args:
        batch: the batch with all rewards, including those that failed or give no signal.
        all_sum: sums over the ranks, each of which has its own trajectories.
        all_max: takes the maximum over the ranks.
        compared: [M] rewards that decide whether a group has a signal; None for ``batch.rewards``.
    """
    assert batch.rewards is not None
    compared = batch.rewards if compared is None else compared
    failed = batch.rewards.isnan()
    rewards = batch.rewards[~failed]
    lengths = batch.completion_lengths.float()
    truncated = torch.tensor([one.is_truncated for one in batch.trajectories], device=lengths.device)
    means = RunningMeans()
    means.add({"reward/mean": rewards, "reward_squared": rewards.double() ** 2})
    counted = batch.select((~failed).nonzero()[:, 0]) if failed.any() else batch
    means.add({"reward/no_signal": _groups_without_signal(counted, compared[~failed]).float()})
    means.add({"reward/failed": failed, "completion/length": lengths, "completion/truncated": truncated})
    for name, component in batch.scores.items():
        means.add({f"reward/{name}": component.nan_to_num()}, ~component.isnan())
    for reason in REASONS:
        began = torch.tensor([one == reason for one in batch.reasons], device=lengths.device).float()
        means.add({f"{BRANCHES}{reason}": torch.zeros_like(lengths).index_add_(0, batch.trajectory_ids, began)})
    means.add_max("completion/length_max", lengths)
    result = means.compute(all_sum, all_max)
    result = {name: value for name, value in result.items() if value or not name.startswith(BRANCHES)}
    variance = result.pop("reward_squared") - result["reward/mean"] ** 2
    return result | {"reward/std": max(variance, 0.0) ** 0.5}


def _groups_without_signal(batch: RolloutBatch, rewards: Tensor) -> Tensor:
    """Return for each group [G] whether its rewards [M] are all equal, so that its advantages are 0."""
    ids, group = torch.unique(batch.group_ids, return_inverse=True)
    signal = find_signal(batch, rewards, tolerance=0.0)
    return torch.ones(ids.numel(), dtype=torch.bool).index_put((group,), ~signal)


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Return the unbiased estimate of pass@k, the probability that at least one of ``k`` samples passes.

    ``1 - C(n-c, k) / C(n, k)`` if ``c`` of ``n`` samples passed (arXiv:2107.03374, eq. 1).
    """
    return 1.0 - comb(num_samples - num_passed, k) / comb(num_samples, k)
