import logging
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from observed_run import ObservedModule, PlainLoop, loader, make_trainer, messages, save_run

from rlightning.callbacks import SaveHF
from rlightning.errors import ConfigError


def test_saved_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rlightning")
    make_trainer(tmp_path, SaveHF()).fit(module := ObservedModule(), loader())
    assert module.saved == [tmp_path / "hf"]
    assert messages(caplog) == [f"saved the model to {tmp_path / 'hf'}"]


def test_export_follows_changes_of_later_callbacks(tmp_path: Path) -> None:
    class Averages(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.weight.data.fill_(100)

    class Exports(ObservedModule):
        def save_hf(self, path: Path) -> None:
            self.saved.append(Path(path.name, str(self.weight.item())))

    exports = [SaveHF(), SaveHF("other")]
    trainer = make_trainer(tmp_path, *exports, Averages(), ModelCheckpoint(tmp_path), enable_checkpointing=True)
    trainer.fit(module := Exports(), loader())
    assert [str(path) for path in module.saved] == ["hf/100.0", "other/100.0"]
    assert trainer.callbacks[-2:] == exports  # type: ignore[attr-defined]


def test_a_path_of_ones_own(tmp_path: Path) -> None:
    callback = SaveHF(str(tmp_path / "models" / "mine"), every_n_steps=2)
    make_trainer(tmp_path, callback).fit(module := ObservedModule(), loader())
    assert module.saved == [tmp_path / "models" / "mine_step_000002", tmp_path / "models" / "mine"]


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    class Policy:
        saved: tuple[Path, ...] = ()

        def save_hf(self, path: Path) -> None:
            self.saved = (*self.saved, path)

    loop: Any = PlainLoop(SaveHF(str(tmp_path / "hf"), every_n_steps=2))
    policy = Policy()
    for loop.global_step in (1, 2, 3):
        loop.step(policy)
    assert policy.saved == (tmp_path / "hf_step_000002",)


def test_resume_keeps_to_the_count_of_steps(tmp_path: Path) -> None:
    saved = save_run(tmp_path, SaveHF(every_n_steps=2), max_steps=3)
    resumed = make_trainer(tmp_path, SaveHF(every_n_steps=2), max_steps=4)
    resumed.fit(module := ObservedModule(), loader(), ckpt_path=saved)
    assert [path.name for path in module.saved] == ["hf_step_000004", "hf"]


def test_module_without_save_hf_raises_before_run(tmp_path: Path) -> None:
    class Other(LightningModule):
        def training_step(self, *args: Any) -> None:
            raise AssertionError

        def configure_optimizers(self) -> None:
            return None

    with pytest.raises(ConfigError, match=r"Other has no save_hf\(path\)"):
        make_trainer(tmp_path, SaveHF()).fit(Other(), loader())


def test_folder_of_earlier_save_is_kept_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "hf_adapter").mkdir()
    make_trainer(tmp_path, SaveHF()).fit(ObservedModule(), loader())
    assert (tmp_path / "hf_adapter").is_dir()
    assert f"{tmp_path / 'hf_adapter'} is not of this save, and is left as it is. {tmp_path / 'hf'} is." in messages(
        caplog
    )
