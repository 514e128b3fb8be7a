"""What ranks have logged for an epoch's end, as a controller logs it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection

from rlightning.controller.epoch_metrics import EpochMetric, log_epoch_metrics, take_epoch_metrics

MEAN = EpochMetric("loss", 1.0, 2, "mean", is_synced=True, on_step=False, prog_bar=False, logger=True)


class Log:
    """Stands for the controller's module, and notes what is logged."""

    def __init__(self) -> None:
        self.logged: dict[str, tuple[float, int, str]] = {}

    def log(self, name: str, value: Any, *, batch_size: int, reduce_fx: str, **options: bool) -> None:
        self.logged[name] = (float(value), batch_size, reduce_fx)


def log(*by_rank: list[EpochMetric]) -> dict[str, tuple[float, int, str]]:
    module: Any = Log()
    log_epoch_metrics(module, by_rank)
    logged: dict[str, tuple[float, int, str]] = module.logged
    return logged


def test_a_mean_over_ranks_is_weighed() -> None:
    assert log([MEAN], [replace(MEAN, value=4.0, batch_size=1)]) == {"loss": (2.0, 3, "mean")}


@pytest.mark.parametrize(("reduction", "expected"), [("sum", 5.0), ("max", 4.0), ("min", 1.0)])
def test_other_reductions_reduce_over_workers(reduction: Any, expected: float) -> None:
    one = replace(MEAN, batch_size=1, reduction=reduction)
    assert log([one], [replace(one, value=4.0)]) == {"loss": (expected, 1, reduction)}


def test_epoch_metric_of_some_ranks_alone_counts() -> None:
    assert log([], [MEAN]) == log([MEAN], []) == {"loss": (1.0, 2, "mean")}


def test_what_is_not_synced_is_rank_0s() -> None:
    own = replace(MEAN, is_synced=False)
    assert log([own], [replace(own, value=4.0)]) == {"loss": (1.0, 2, "mean")}
    assert log([], [own]) == {}


def test_a_step_is_taken_once() -> None:
    results = _ResultCollection(training=True)
    for value, size in ((1.0, 1), (4.0, 2)):
        results.log("training_step", "mean", torch.tensor(value), on_epoch=True, batch_size=size)
        results.log("training_step", "step", torch.tensor(value), on_step=True, on_epoch=False)
        results.log("training_step", "none", torch.tensor(value), on_epoch=True, batch_size=0)
        results.log("training_step", "own", torch.tensor(value), sync_dist=True, rank_zero_only=True, batch_size=1)
    mean, own = take_epoch_metrics(results)
    assert (mean.name, mean.value, mean.batch_size, mean.reduction) == ("mean", 3.0, 3, "mean")
    assert own.name == "own" and not own.is_synced
    assert take_epoch_metrics(results) == []
    results.log("training_step", "mean", torch.tensor(7.0), on_epoch=True, batch_size=1)
    assert [metric.value for metric in take_epoch_metrics(results)] == [7.0]
