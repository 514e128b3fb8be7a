"""Lightning's monitoring callbacks under manual optimization, on a module that logs what a test says."""

import io
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_project import fit_here
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from tiny import bare_trainer
from torch import nn
from torch.utils.data import DataLoader

from rlightning.errors import ConfigError
from rlightning.module.monitoring import adapt_monitoring
from rlightning.parallel.checkpoint_io import read_state
from rlightning.parallel.stop_signal import EndOnSigterm


class Scripted(LightningModule):
    """Takes a step a batch, four batches an epoch; logs ``reward``, and ``val/reward`` as listed by step."""

    def __init__(self, rewards: Sequence[float] = (), kill_at: int | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = nn.Parameter(torch.zeros(1))
        self.rewards, self.kill_at = rewards, kill_at

    def configure_callbacks(self) -> list[Callback]:
        adapt_monitoring(self.trainer.callbacks)  # type: ignore[attr-defined]
        return [EndOnSigterm()]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.weight.grad = torch.ones(1)
        optimizer.step()
        self.log("reward", float(self.trainer.global_step))
        if self.trainer.global_step == self.kill_at:
            os.kill(os.getpid(), signal.SIGTERM)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.rewards:
            self.log("val/reward", self.rewards[self.trainer.global_step])

    def train_dataloader(self) -> Any:
        return DataLoader(torch.zeros(4))  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return DataLoader(torch.zeros(1)) if self.rewards else []  # type: ignore[arg-type]


def fit(folder: Path, module: LightningModule, steps: int, *callbacks: Callback, **kwargs: Any) -> Trainer:
    trainer = bare_trainer(folder, steps, *callbacks, enable_checkpointing=True, **kwargs)
    trainer.fit(module)
    return trainer


def steps_in(folder: Path) -> dict[str, int]:
    """The step that each checkpoint holds."""
    states = {path.name: read_state(path) for path in sorted(folder.glob("**/*.ckpt"))}
    return {name: state.step for name, state in states.items() if state is not None}


EVERY_TWO: dict[str, Any] = {"val_check_interval": 2, "check_val_every_n_epoch": None}
UNCHANGED = [0.5] * 9


@pytest.mark.parametrize("rewards", [UNCHANGED, ()])
def test_checkpoint_after_last_interval_has_last_step(rewards: Sequence[float], tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, save_last="link", enable_version_counter=False)
    fit(tmp_path, Scripted(rewards), 6, checkpoint, val_check_interval=4, check_val_every_n_epoch=None)
    assert steps_in(tmp_path) == {"epoch=1-step=6.ckpt": 6, "last.ckpt": 6}


def test_checkpoint_without_validation_set_saves_at_epoch_end(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, save_top_k=-1)
    fit(tmp_path, Scripted(), 6, checkpoint, val_check_interval=3, check_val_every_n_epoch=None)
    assert list(steps_in(tmp_path).values()) == [4, 6]


@pytest.mark.parametrize("save_last", [True, "link", None])
def test_last_checkpoint_follows_metric_that_does_not_improve(save_last: Any, tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, monitor="val/reward", filename="best", save_last=save_last)
    fit(tmp_path, Scripted(UNCHANGED), 8, checkpoint, **EVERY_TWO)
    assert steps_in(tmp_path) == {"best.ckpt": 2, "last.ckpt": 8}


def test_one_of_several_callbacks_saves_last_state(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path / "best", monitor="val/reward", filename="best")
    every = ModelCheckpoint(tmp_path / "every", filename="{step}", every_n_train_steps=4)
    fit(tmp_path, Scripted(UNCHANGED), 6, best, every, **EVERY_TWO)
    assert steps_in(tmp_path) == {"best.ckpt": 2, "step=6.ckpt": 6}


def test_checkpoint_with_top_k_0_saves_nothing(tmp_path: Path) -> None:
    fit(tmp_path, Scripted(), 2, ModelCheckpoint(tmp_path, save_top_k=0))
    assert steps_in(tmp_path) == {}


def test_checkpoint_time_interval_saves_under_manual_optimization(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, train_time_interval=timedelta(0))
    fit(tmp_path, Scripted(), 3, checkpoint)
    assert list(steps_in(tmp_path).values()) == [1, 2, 3]


def test_checkpoint_time_interval_saves_once_it_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class TakesTime(Scripted):
        """A step takes a minute."""

        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            monkeypatch.setattr("time.monotonic", lambda: started + 60 * self.trainer.global_step)

    started = time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: started)
    checkpoint = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, train_time_interval=timedelta(seconds=150))
    fit(tmp_path, TakesTime(), 8, checkpoint)
    # Over after 3 minutes, then after 3 more; the last state is saved anyway.
    assert list(steps_in(tmp_path).values()) == [3, 6, 8]


def test_last_state_is_named_by_its_own_epoch(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1)
    fit(tmp_path, Scripted(), 8, checkpoint)  # two epochs of four steps, both of them over
    assert steps_in(tmp_path) == {"epoch=0-step=3.ckpt": 3, "epoch=1-step=6.ckpt": 6, "epoch=1-step=8.ckpt": 8}


@pytest.mark.parametrize("every", [2, 1])
def test_checkpoint_metric_belongs_to_its_step(every: int, tmp_path: Path) -> None:
    # By the value of the validation before, step 6 would be the best.
    checkpoint = ModelCheckpoint(
        tmp_path, monitor="val/reward", mode="max", filename="{step}", every_n_train_steps=every
    )
    fit(tmp_path, Scripted([0.1, 0, 0.2, 0, 0.9, 0, 0.1, 0, 0.3]), 8, checkpoint, **EVERY_TWO)
    assert steps_in(tmp_path) == {"step=4.ckpt": 4, "last.ckpt": 8}
    assert checkpoint.best_model_score is not None
    assert checkpoint.best_model_score.item() == pytest.approx(0.9)


def test_checkpoint_by_training_metric_saves_in_its_step(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, monitor="reward", mode="max", filename="{step}", every_n_train_steps=3)
    fit(tmp_path, Scripted(UNCHANGED), 8, checkpoint, **EVERY_TWO)
    assert steps_in(tmp_path) == {"step=6.ckpt": 6, "last.ckpt": 8}


@pytest.mark.parametrize("rewards", [UNCHANGED, ()])
@pytest.mark.parametrize("kind", [ModelCheckpoint, EarlyStopping])
def test_misspelt_monitor_names_nearest_metric(kind: Any, rewards: Sequence[float], tmp_path: Path) -> None:
    callback = kind(monitor="rewrad")
    message = rf"^{kind.__name__}\.monitor='rewrad' is not a metric of this run\. Did you mean 'reward'\?"
    with pytest.raises(ConfigError, match=message):
        fit(tmp_path, Scripted(rewards), 8, callback, **EVERY_TWO)


@pytest.mark.long
def test_monitor_of_epoch_end_metric_is_awaited(tmp_path: Path) -> None:
    class LogsAtEpochEnd(Scripted):
        def on_train_epoch_end(self) -> None:
            self.log("late", 1.0)

    checkpoint = ModelCheckpoint(tmp_path, monitor="late", filename="best")
    fit(tmp_path, LogsAtEpochEnd(), 8, checkpoint)
    assert steps_in(tmp_path)["best.ckpt"] == 4


def test_early_stopping_by_training_metric_survives_first_validation(tmp_path: Path) -> None:
    class ValidatesFirst(Scripted):
        def on_train_start(self) -> None:
            from rlightning.parallel.trainer_stages import validate_in_fit

            validate_in_fit(self.trainer)

    stop = EarlyStopping("reward", mode="max", patience=1, stopping_threshold=3.5)
    assert fit(tmp_path, ValidatesFirst(UNCHANGED), 8, stop, **EVERY_TWO).global_step == 4


def test_early_stopping_by_training_metric_checks_after_validations(tmp_path: Path) -> None:
    stop = EarlyStopping("reward", mode="max", patience=9, stopping_threshold=2.5)
    assert fit(tmp_path, Scripted(UNCHANGED), 8, stop, **EVERY_TWO).global_step == 4  # not the third step


def test_early_stopping_without_validation_checks_at_epoch_end(tmp_path: Path) -> None:
    stop = EarlyStopping("reward", mode="min", patience=1)
    trainer = fit(tmp_path, Scripted(), 20, stop, val_check_interval=2, check_val_every_n_epoch=None)
    assert trainer.global_step == 8  # no better at the second epoch's end


def test_early_stopping_patience_is_that_of_this_run(tmp_path: Path) -> None:
    stop = EarlyStopping("val/reward", patience=7)
    adapt_monitoring([stop])
    stop.load_state_dict(EarlyStopping("val/reward", patience=2).state_dict())
    assert stop.patience == 7


def test_checkpoint_keeps_as_many_as_this_run_says(tmp_path: Path) -> None:
    three, one = (ModelCheckpoint(tmp_path, monitor="reward", mode="max", save_top_k=k) for k in (3, 1))
    adapt_monitoring([one])
    scores = {f"{tmp_path}/{step}.ckpt": torch.tensor(float(step)) for step in (1, 3, 2)}
    one.load_state_dict(three.state_dict() | {"best_k_models": scores})
    assert one.best_k_models == {f"{tmp_path}/3.ckpt": torch.tensor(3.0)}
    assert one.kth_best_model_path == f"{tmp_path}/3.ckpt"


class Named(ModelCheckpoint):
    """A user's own, with a hook of its own."""

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.num_batches = getattr(self, "num_batches", 0) + 1
        super().on_train_batch_end(*args, **kwargs)


def test_subclass_of_checkpoint_keeps_hooks_and_state_key(tmp_path: Path) -> None:
    own = Named(tmp_path, filename="{step}", save_top_k=-1, train_time_interval=timedelta(0))
    key = own.state_key
    fit(tmp_path, Scripted(), 2, own)
    assert own.state_key == key and own.num_batches == 2
    assert list(steps_in(tmp_path).values()) == [1, 2]
    plain = ModelCheckpoint(tmp_path)
    key = plain.state_key
    adapt_monitoring([plain])
    assert plain.state_key == key


def test_sigterm_saves_last_state_and_exits_with_143(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray leaves a handler of its own in a process
    try:
        with pytest.raises(SIGTERMException) as stop:
            fit(tmp_path, Scripted(kill_at=3), 8, checkpoint)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stop.value.code == 143
    assert steps_in(tmp_path) == {"step=3.ckpt": 3}
    trainer = bare_trainer(tmp_path, 8, ModelCheckpoint(tmp_path), enable_checkpointing=True)
    trainer.fit(module := Scripted(), ckpt_path=tmp_path / "step=3.ckpt")
    assert module.weight.item() == -8.0


class OneWriter(io.StringIO):
    """Refuses to be written to from within a write, as Python's buffered files do; SIGTERM comes within the first."""

    is_inside = is_sent = False

    def write(self, text: str) -> int:
        if self.is_inside:
            raise RuntimeError("reentrant call inside <_io.BufferedWriter>")
        self.is_inside = True
        try:
            if not self.is_sent:
                self.is_sent = True
                os.kill(os.getpid(), signal.SIGTERM)
            return super().write(text)
        finally:
            self.is_inside = False


def test_sigterm_within_a_write_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Telling(Scripted):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            if self.trainer.global_step == 3:
                with monkeypatch.context() as patch:
                    patch.setattr(sys, "stderr", stream := OneWriter())
                    patch.setattr(logging.getLogger("lightning.pytorch"), "handlers", [logging.StreamHandler(stream)])
                    sys.stderr.write("a line")
                    assert stream.getvalue() == "a line"

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(SIGTERMException):
            fit(tmp_path, Telling(), 8, ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert steps_in(tmp_path) == {"step=3.ckpt": 3}


def test_top_k_without_a_metric_is_one_line(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = ("--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.save_top_k", "2")
    code, said = fit_here(capsys, "--config", "run.yaml", *listed)
    assert (code, said.count("\n")) == (2, 1), said
    assert "ModelCheckpoint(save_top_k=2, monitor=None) is not a valid configuration." in said
