"""Names of metrics, known before a run has logged any."""

from pathlib import Path
from typing import Any

import pytest
from cli_project import fit_here
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from metrics_table import documented_names
from tiny import bare_trainer, make_data, save_model, share_of_ones

from rlightning.algorithms import GRPO
from rlightning.callbacks import VLLMRollout
from rlightning.errors import ConfigError
from rlightning.module.metric_names import OF_SECTIONS, find_names, is_among
from rlightning.rewards import RewardFunction


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def make_grpo(model: str) -> GRPO:
    rewards = [RewardFunction(share_of_ones), RewardFunction(share_of_ones, name="last_step")]
    return GRPO(model, rewards=rewards, prompts_per_step=4, samples_per_prompt=2)


def fit(folder: Path, model: str, *listed: Callback) -> None:
    data = make_data(folder, validation={"sums": str(folder / "sums.jsonl")})
    trainer = bare_trainer(folder, 1, VLLMRollout(), *listed, enable_checkpointing=True)
    trainer.fit(make_grpo(model), datamodule=data)


def test_names_are_those_of_the_table() -> None:
    names = [f"{section}/{name}" for section, written in OF_SECTIONS.items() for name in written.split()]
    assert sorted(names) == sorted(documented_names())


@pytest.mark.parametrize(
    ("callback", "nearest"),
    [
        (EarlyStopping("reward/maen"), "reward/mean"),
        (ModelCheckpoint(monitor="val/sum/reward"), "val/sums/reward"),
        (ModelCheckpoint(monitor="reward/last_steps"), "reward/last_step"),
    ],
)
def test_misspelt_monitor_is_refused_before_an_engine_starts(
    callback: Any, nearest: str, model: str, tmp_path: Path
) -> None:
    name = f"{type(callback).__name__}.monitor='{callback.monitor}'"
    with pytest.raises(ConfigError) as caught:
        fit(tmp_path, model, callback)
    assert str(caught.value) == f"{name} is not a metric of this run. Did you mean '{nearest}'?"
    assert not (tmp_path / "engine.log").exists()


def test_names_are_unknown_with_code_of_users(model: str, tmp_path: Path) -> None:
    class OwnGRPO(GRPO):
        pass

    class OwnCallback(Callback):
        pass

    data: Any = make_data(tmp_path, validation={"sums": str(tmp_path / "sums.jsonl")})

    def names_with(module: Any, *listed: Callback, datamodule: Any = data) -> list[str] | None:
        trainer: Any = bare_trainer(tmp_path, 1, *listed)
        trainer.datamodule = datamodule
        return find_names(trainer, module)

    module = make_grpo(model)
    names = names_with(module, EarlyStopping("x"))
    assert names is not None
    for known in (
        "val/sums/pass@4",
        "reward/share_of_ones",
        "reward/last_step",
        "policy/loss_step",
        "async/staleness_2",
    ):
        assert is_among(known, names)
    for unknown in ("reward/other", "val/other/reward", "policy/los", "loss"):
        assert not is_among(unknown, names)
    assert names_with(OwnGRPO(model, rewards=[RewardFunction(share_of_ones)])) is None
    assert names_with(module, OwnCallback()) is None
    assert names_with(module, LambdaCallback()) is None
    assert names_with(module, datamodule=None) is None


@pytest.mark.long
def test_misspelt_monitor_ends_the_command_at_once(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor", "policy/los")
    code, errors = fit_here(capsys, "--config", "run.yaml", *options)
    assert code == 2
    message = "error: EarlyStopping.monitor='policy/los' is not a metric of this run. Did you mean 'policy/loss'?"
    assert errors.splitlines()[-1] == message
    assert not [*project.glob("runs/*/checkpoints/*")]
