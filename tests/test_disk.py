"""Runs whose disk takes no files: what only observes them is left out and comes again, a checkpoint ends them."""

import csv
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from disks import Disk, Kind, made_disk
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import make_completion, make_data, make_grpo, make_trainer, save_model
from torch.distributed.checkpoint import state_dict_saver

from rlightning.callbacks import CompletionsTable, RunReport, SaveHF
from rlightning.cli.lightning_cli import SaveRunConfig
from rlightning.disk import BestEffort, find_disk_error
from rlightning.errors import ConfigError, SaveError
from rlightning.parallel.checkpoint_io import AtomicCheckpointIO
from rlightning.report.loggers import MetricsFile, adapt_loggers
from rlightning.report.prediction_file import PredictionFile
from rlightning.types import Prompt, Trajectory

OBSERVERS = ("Metrics of CSVLogger", "Metrics of TensorBoardLogger", "Completions", "Reports")


@pytest.fixture(params=get_args(Kind))
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Disk]:
    with made_disk(tmp_path, request.param) as disk:
        yield disk


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Disk]:
    with made_disk(tmp_path, "full") as disk:
        yield disk


class Strike(Callback):
    """Breaks a disk before the third step, and repairs it before the fifth."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            self.disk.break_down()
        elif trainer.global_step == 4:
            self.disk.repair()


@pytest.mark.long
def test_run_goes_on_where_observers_cannot_write(disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = disk.folder
    trainer = make_trainer(
        tmp_path / "run",
        6,
        Strike(disk),
        CompletionsTable(every_n_steps=1, path=str(folder / "completions")),
        RunReport(str(folder / "report.html"), every_n_steps=1),
        logger=[CSVLogger(folder, "metrics", 0), TensorBoardLogger(folder, "board", 0)],
    )
    with caplog.at_level(logging.INFO):
        trainer.fit(make_grpo(save_model(tmp_path / "model")), make_data(tmp_path))
    assert trainer.global_step == 6

    is_removed = disk.kind == "removed"  # with what the first two steps had written
    with (folder / "metrics/version_0/metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["reward/mean"]]
    assert [int(row["step"]) for row in rows] == list(range(3 if is_removed else 1, 7)), "kept in memory meanwhile"
    tables = sorted(path.name for path in (folder / "completions").iterdir())
    assert tables == [f"step_00000{step}.parquet" for step in ([5, 6] if is_removed else [1, 2, 5, 6])]
    assert "finished" in (folder / "report.html").read_text()
    board = EventAccumulator(str(folder / "board/version_0")).Reload()  # orders files by their names
    assert sorted(event.step for event in board.Scalars("reward/mean")) == ([5, 6] if is_removed else [1, 2, 5, 6])

    said = [record.getMessage() for record in caplog.records]
    for name in OBSERVERS:
        failed = [line for line in said if line.startswith(f"{name} cannot be written (")]
        again = [line for line in said if line == f"{name} are written again."]
        # The last page of a file takes some more bytes on a full disk.
        assert len(failed) == len(again) == 1 or (len(failed) <= 1 and disk.kind == "full" and "CSV" in name), said


def test_metrics_file_is_whole_whatever_fails(full_disk: Disk) -> None:
    writer = ExperimentWriter(str(full_disk.folder / "metrics"))
    writer.__class__ = MetricsFile
    path = Path(writer.metrics_file_path)
    writer.log_metrics({"a": 1.0}, 0)
    writer.save()
    assert path.read_bytes() == b"a,step\r\n1.0,0\r\n"
    full_disk.break_down()
    for step in range(1, 3001):
        writer.log_metrics({"a": 2.0}, step)
    with pytest.raises(OSError, match="No space left"):
        writer.save()
    writer.log_metrics({"a": 3.0, "b": 4.0}, 3001)  # a new column
    with pytest.raises(OSError, match="No space left"):
        writer.save()
    assert path.read_bytes() == b"a,step\r\n1.0,0\r\n"
    full_disk.repair()
    writer.save()
    lines = path.read_text().splitlines()
    assert lines[:3] == ["a,b,step", "1.0,,0", "2.0,,1"] and lines[-1] == "3.0,4.0,3001" and len(lines) == 3003
    assert [entry.name for entry in path.parent.iterdir()] == ["metrics.csv"]


class OwnLogger(CSVLogger):
    """A user's, whose errors of the disk are in errors of its own."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise ValueError("cannot log") from error


def test_loggers_keep_their_class_and_their_other_errors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = OwnLogger(tmp_path)
    adapt_loggers([own])
    adapt_loggers([own])
    assert isinstance(own, OwnLogger) and type(own).__name__ == "OwnLogger"
    for _ in range(3):
        own.log_metrics({"a": 1.0}, 0)
        own.save()
    assert [record.getMessage() for record in caplog.records] == [
        "Metrics of OwnLogger cannot be written (No space left on device). The run goes on without, and writes them "
        "again as soon as it can."
    ]
    with pytest.raises(ZeroDivisionError), BestEffort("Things").attempt():
        _ = 1 / 0


@pytest.mark.long
def test_full_disk_at_checkpoint_ends_run_in_a_line(full_disk: Disk, tmp_path: Path) -> None:
    checkpoints = ModelCheckpoint(full_disk.folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(tmp_path, 100, checkpoints, enable_checkpointing=True, plugins=[AtomicCheckpointIO()])
    with pytest.raises(SaveError) as caught:
        trainer.fit(make_grpo(save_model(tmp_path / "model")), make_data(tmp_path))
    step = trainer.global_step
    last, failed = (full_disk.folder / f"step={number}.ckpt" for number in (step - 1, step))
    message = rf"The checkpoint '{failed}' cannot be written: .+\. The last good one is '{last}'\. Make room there, "
    assert re.fullmatch(rf"{message}or name another folder, and go on from it\.", str(caught.value))
    assert torch.load(last, weights_only=False)["global_step"] == step - 1
    assert sorted(full_disk.folder.iterdir()) == sorted(full_disk.folder / f"step={n}.ckpt" for n in range(1, step))


def test_checkpoint_in_read_only_folder_keeps_its_predecessor(tmp_path: Path) -> None:
    with made_disk(tmp_path, "read-only") as disk:
        path = disk.folder / "last.ckpt"
        AtomicCheckpointIO().save_checkpoint({"step": 1}, path)
        disk.break_down()
        with pytest.raises(SaveError, match=rf"Read-only file system.*The last good one is '{path}'"):
            AtomicCheckpointIO().save_checkpoint({"step": 2}, path)
        assert AtomicCheckpointIO().load_checkpoint(path) == {"step": 1}


def test_model_that_cannot_be_saved_is_a_line(full_disk: Disk, tmp_path: Path) -> None:
    module = make_grpo(save_model(tmp_path / "model"))
    module.configure_model()
    full_disk.break_down()
    callback = SaveHF(str(full_disk.folder / "hf"))
    with pytest.raises(SaveError, match=r"^The model '.*/hf' cannot be written: .*No space left.*checkpoints are kept"):
        callback.on_train_end(make_trainer(tmp_path, 1), module)


def test_disk_errors_are_told_from_others(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BaseException) as caught:
        state_dict_saver.save({"a": torch.ones(1)}, checkpoint_id=tmp_path / "file" / "sharded", no_dist=True)
    assert "Not a directory" in str(find_disk_error(caught.value))
    with pytest.raises(RuntimeError) as failed:
        torch.save({}, "/dev/full")
    assert find_disk_error(failed.value) == "the disk did not take all of it"
    for other in (TimeoutError("a rank is missing"), ConnectionResetError(104, "reset"), ValueError(), RuntimeError()):
        assert find_disk_error(other) is None


def test_predictions_go_on_after_a_full_disk(full_disk: Disk) -> None:
    path = full_disk.folder / "predictions.jsonl"
    prompts = [Prompt(index, f"prompt {index}", [1], {}) for index in range(3)]
    completions = [Trajectory.single_turn(prompts[0], make_completion([1] * 3000))]
    file = PredictionFile(path, {})
    file.open()
    file.write(prompts[0], completions)
    full_disk.break_down()
    with pytest.raises(SaveError, match=r"predictions\.jsonl\.partial' cannot be written: No space left .* is kept"):
        for _ in range(3):  # the file's last page takes some
            file.write(prompts[1], completions)
    file.close()
    full_disk.repair()
    again = PredictionFile(path, {})
    done = again.read()
    assert 0 in done and 2 not in done
    again.open()
    for prompt in prompts:
        if prompt.index not in done:
            again.write(prompt, completions)
    again.finish()
    assert len(path.read_text().splitlines()) == 3 and os.listdir(full_disk.folder) == ["predictions.jsonl"]


def test_configuration_on_full_disk_leaves_no_half_file(full_disk: Disk) -> None:
    parser = LightningArgumentParser()
    parser.add_argument("--text", type=str)
    full_disk.break_down()
    trainer: Any = SimpleNamespace(is_global_zero=True, default_root_dir=full_disk.folder)
    saver = SaveRunConfig(parser, Namespace(text="a" * 100_000))
    path = full_disk.folder / "config.yaml"
    with pytest.raises(SaveError, match=rf"^The configuration '{path}' cannot be written: No space left on device"):
        saver.setup(trainer, None, "fit")  # type: ignore[arg-type]
    assert [file.name for file in full_disk.folder.iterdir()] == ["full"]


def test_loggers_bare_name_stays_unique_after_run(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    adapt_loggers([logger])
    assert type(logger) is not CSVLogger and isinstance(logger, CSVLogger)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--logger", type=Logger)
    found = parser.parse_args(["--logger", "CSVLogger", "--logger.save_dir", str(tmp_path)])
    assert found.logger.class_path == "lightning.pytorch.loggers.CSVLogger"


@pytest.mark.parametrize(("error", "is_kept"), [(ConfigError("no"), False), (RuntimeError("no"), True)])
def test_configuration_of_a_refused_resume_is_removed(error: Exception, is_kept: bool, tmp_path: Path) -> None:
    parser = LightningArgumentParser()
    parser.add_argument("--text", type=str)
    trainer: Any = SimpleNamespace(is_global_zero=True, default_root_dir=tmp_path, loggers=[])
    module: Any = None
    (tmp_path / "config.yaml").touch()
    refused, begun = (SaveRunConfig(parser, Namespace(text="a")) for _ in range(2))
    refused.setup(trainer, module, "fit")
    refused.on_exception(trainer, module, error)
    assert (tmp_path / "config-2.yaml").exists() == is_kept
    begun.setup(trainer, module, "fit")
    begun.on_train_start(trainer, module)
    before = sorted(tmp_path.iterdir())
    begun.on_exception(trainer, module, error)
    assert sorted(tmp_path.iterdir()) == before
