"""Metrics logged with ``on_epoch=True`` in workers, which the controller reduces at the end of an epoch.

After each step every worker sends the step's contribution to these metrics, and the controller logs it, so that
Lightning reduces it over the controller's epoch, where loggers and callbacks read it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from lightning.pytorch import LightningModule

from rlightning.lightning_internals import Results


@dataclass(frozen=True)
class EpochMetric:
    """The contribution of one step to a metric that is logged with ``on_epoch=True``.

    Attributes:
        reduction: mean, sum, max or min.
        is_synced: whether it is reduced over all ranks (``sync_dist``); otherwise it is rank 0's.
        on_step, prog_bar, logger: see ``LightningModule.log``.
    """

    name: str
    value: float
    batch_size: int
    reduction: str
    is_synced: bool
    on_step: bool
    prog_bar: bool
    logger: bool


def take_epoch_metrics(results: Results) -> list[EpochMetric]:
    """Return this worker's metrics with ``on_epoch=True`` since the last call, and reset them in Lightning's results.

    A torchmetrics metric is represented by its computed value.
    """
    taken = []
    for _, result in results.valid_items():
        meta = result.meta
        reduction = meta.reduce_fx.__name__ if result.is_tensor else "mean"
        batch_size = int(result.cumulated_batch_size) if result.is_tensor and reduction == "mean" else 1
        if not meta.on_epoch or not batch_size:
            continue
        value = float(result.value if result.is_tensor else result.value.compute())
        taken.append(
            EpochMetric(
                meta.name,
                value / batch_size,
                batch_size,
                reduction,
                is_synced=meta.sync.should and not meta.sync.rank_zero_only,
                on_step=meta.on_step,
                prog_bar=meta.prog_bar,
                logger=meta.logger,
            )
        )
        result.reset()
    return taken


def log_epoch_metrics(module: LightningModule, by_rank: Sequence[Sequence[EpochMetric]]) -> None:
    """Log in the controller one step's metrics with ``on_epoch=True``: reduced over ranks if synced, else rank 0's."""
    named = [{metric.name: metric for metric in taken} for taken in by_rank]
    for name in dict.fromkeys(name for taken in named for name in taken):
        parts = [taken[name] for taken in named if name in taken]
        if not parts[0].is_synced and name not in named[0]:
            continue
        metric = merge(parts) if parts[0].is_synced else parts[0]
        module.log(
            metric.name,
            torch.tensor(metric.value),
            on_epoch=True,
            batch_size=metric.batch_size,
            reduce_fx=metric.reduction,
            on_step=metric.on_step,
            prog_bar=metric.prog_bar,
            logger=metric.logger,
        )


def merge(parts: Sequence[EpochMetric]) -> EpochMetric:
    """Return one metric for all ranks: the sum, maximum, minimum, or mean weighted by batch size of their values."""
    values, sizes = [part.value for part in parts], [part.batch_size for part in parts]
    first = parts[0]
    if first.reduction == "sum":
        return replace(first, value=sum(values))
    if first.reduction != "mean":
        return replace(first, value=max(values) if first.reduction == "max" else min(values))
    total = sum(value * size for value, size in zip(values, sizes, strict=True))
    return replace(first, value=total / sum(sizes), batch_size=sum(sizes))
