"""Metrics that code of the user's logs for an epoch: their weights, and their step."""

import csv
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from tiny import make_data, make_trainer, save_model, share_of_ones

from rlightning.algorithms import GRPO
from rlightning.rewards import RewardFunction


class Watch(Callback):
    """Logs for an epoch in each kind of hook."""

    log: Any  # given by Lightning
    log_dict: Any

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.log("watch/start", float(batch_idx), on_step=False, on_epoch=True)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("watch/batch", float(batch_idx), on_step=True, on_epoch=True)
        self.log_dict({"watch/step": float(batch_idx)})

    def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
        batch_idx = args[3]
        self.log("watch/val", float(batch_idx), on_epoch=True)
        self.log_dict({"watch/val_dict": float(batch_idx)})

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.log("watch/end", float(trainer.current_epoch))


class Watched(GRPO):
    def training_step(self, prompts: Any, batch_idx: int) -> None:
        super().training_step(prompts, batch_idx)
        self.log("own/batch", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="max")

    def validation_step(self, prompts: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(prompts, batch_idx, dataloader_idx)
        self.log("own/val", float(batch_idx), on_epoch=True)


class WatchedAtEnd(Watched):
    def on_train_epoch_end(self) -> None:
        self.log("own/end", 7.0)


def fit(folder: Path, kind: type[GRPO], *callbacks: Callback) -> list[dict[str, str]]:
    """Two epochs of four steps of four prompts each, validated on batches of 5, 5, 5 and 1; the rows of the CSV."""
    rewards = [RewardFunction(share_of_ones)]
    module = kind(save_model(folder / "model"), rewards=rewards, prompts_per_step=4, samples_per_prompt=2)
    logger = CSVLogger(folder, name="", version="csv")
    trainer = make_trainer(folder, 8, *callbacks, logger=logger, val_check_interval=4, check_val_every_n_epoch=None)
    data = make_data(folder, validation=str(folder / "sums.jsonl"), validation_batch_size=5)
    trainer.fit(module, data)
    with (folder / "csv" / "metrics.csv").open() as lines:
        return list(csv.DictReader(lines))


def points(rows: list[dict[str, str]], name: str) -> list[tuple[int, float]]:
    return [(int(row["step"]), float(row[name])) for row in rows if row.get(name)]


@pytest.mark.long
def test_epoch_metrics_are_weighted_at_their_step(tmp_path: Path) -> None:
    rows = fit(tmp_path, Watched, Watch())
    assert points(rows, "watch/start") == points(rows, "watch/batch_epoch") == [(4, 1.5), (8, 1.5)]
    assert points(rows, "own/batch") == [(4, 3.0), (8, 3.0)]
    assert points(rows, "watch/end") == [(4, 0.0), (8, 1.0)]
    per_step = [(step, float((step - 1) % 4)) for step in range(1, 9)]
    assert points(rows, "watch/batch_step") == points(rows, "watch/step") == per_step
    # (5 * 0 + 5 * 1 + 5 * 2 + 1 * 3) / 16 = 1.125, before the first step and at the end of each epoch
    for name in ("watch/val", "watch/val_dict", "own/val"):
        assert points(rows, name) == [(0, 1.125), (4, 1.125), (8, 1.125)]
    steps = [int(row["step"]) for row in rows]
    assert steps == sorted(steps)


@pytest.mark.long
def test_module_metric_of_epoch_end_has_step(tmp_path: Path) -> None:
    rows = fit(tmp_path, WatchedAtEnd)
    assert points(rows, "own/end") == [(4, 7.0), (8, 7.0)]


@pytest.mark.long
def test_epochs_without_metrics_leave_no_rows(tmp_path: Path) -> None:
    rows = fit(tmp_path, GRPO)
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
