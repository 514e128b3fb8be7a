"""A run that goes on: which settings decide, and what it says of them."""

import re
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import bare_trainer, copy_weights, make_data, save_model

from rlightning.algorithms import SFT
from rlightning.config.run_settings import describe_changes, flatten


def test_flatten_gives_keys_of_the_command_line() -> None:
    nested = {
        "config": ["run.yaml"],
        "ckpt_path": "last",
        "seed_everything": 0,
        "model": {"class_path": "A", "init_args": {"lr": 1, "betas": [0.9, 0.99]}},
        "trainer": {"callbacks": [{"class_path": "B", "init_args": {"n": 2}}, "C"], "logger": {}},
    }
    assert flatten(nested) == {
        "seed_everything": 0,
        "model.class_path": "A",
        "model.lr": 1,
        "model.betas": [0.9, 0.99],
        "trainer.callbacks.0.class_path": "B",
        "trainer.callbacks.0.n": 2,
        "trainer.callbacks.1": "C",
        "trainer.logger": {},
    }


def test_changes_are_a_block_of_key_old_and_new() -> None:
    whole = {"model.class_path": "A", "same": 1, "model.lr": 0.1}
    block = describe_changes(whole | {"gone": "x"}, whole | {"model.lr": 0.25, "added": "y" * 70})
    assert block is not None
    assert [line.split() for line in block.splitlines()[1:]] == [
        ["key", "checkpoint", "this", "run"],
        ["added", "-", f"{'y' * 60}..."],
        ["gone", "x", "-"],
        ["model.lr", "0.1", "0.25"],
    ]
    assert describe_changes(whole, dict(whole)) is None
    assert describe_changes({"model.lr": 0.1}, whole) is None  # of a run without a command line


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def train(folder: Path, model: str, max_steps: int, ckpt_path: Path | None = None, **settings: Any) -> SFT:
    usual: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "lr_schedule": "linear"}
    module = SFT(model, completion_column="answer", prompts_per_step=4, **usual | settings)
    checkpoint = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = bare_trainer(folder, max_steps, checkpoint, enable_checkpointing=True)
    trainer.fit(module, datamodule=make_data(folder), ckpt_path=ckpt_path)
    return module


@pytest.fixture(scope="module")
def whole(model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SFT]:
    """Four steps, with a checkpoint after the second."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(folder, model, 4)


def test_resume_with_equal_settings_is_bit_equal_and_silent(
    whole: tuple[Path, SFT], model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rlightning")
    folder, uninterrupted = whole
    resumed = train(tmp_path, model, 4, folder / "step=2.ckpt")
    expected = copy_weights(uninterrupted)
    assert all(weight.equal(expected[name]) for name, weight in copy_weights(resumed).items())
    assert "goes on with other settings" not in caplog.text


def test_resume_obeys_configured_lr_betas_and_weight_decay(
    whole: tuple[Path, SFT], model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rlightning")
    changed: dict[str, Any] = {"lr": 0.04, "betas": (0.8, 0.9), "weight_decay": 0.3}
    resumed = train(tmp_path, model, 4, whole[0] / "step=2.ckpt", **changed)
    matrices, vectors = resumed.trainer.optimizers[0].param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert matrices["betas"] == vectors["betas"] == (0.8, 0.9)
    assert matrices["initial_lr"] == 0.04
    for row in (r"model\.lr +0\.01 +0\.04", r"model\.betas +\[0\.9, 0\.999\] +\[0\.8, 0\.9\]", "decay +0.1 +0.3"):
        assert re.search(row, caplog.text)
    assert "model.warmup_steps" not in caplog.text


def test_resume_with_longer_max_steps_stretches_the_schedule(
    whole: tuple[Path, SFT], model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rlightning")
    rates = []

    class Noting(SFT):
        def update(self, batch: Any) -> dict[str, float]:
            rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
            return super().update(batch)

    module = Noting(model, completion_column="answer", prompts_per_step=4, lr=0.01, lr_schedule="linear")
    trainer = bare_trainer(tmp_path, 8)
    trainer.fit(module, datamodule=make_data(tmp_path), ckpt_path=whole[0] / "step=4.ckpt")
    assert rates == pytest.approx([0.01 * rest / 8 for rest in (4, 3, 2, 1)])
    assert re.search(r"trainer\.max_steps +4 +8", caplog.text)
