"""Defaults that the command line sets before it creates any object."""

from pathlib import Path
from typing import Any

import pytest
from jsonargparse import Namespace
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy

from rlightning.callbacks import EmptyCacheAfterUpdate, OffloadDuringRollout, VLLMRollout
from rlightning.cli.lightning_cli import expand_home
from rlightning.cli.parser_messages import summarise
from rlightning.errors import ConfigError
from rlightning.parallel.checkpoint_io import AtomicCheckpointIO
from rlightning.run_dir import new_run_folder
from rlightning.trainer import add_checkpoint_io, order_callbacks, settle_lengths


def trainer(**given: Any) -> Namespace:
    unset = {"max_epochs": None, "max_steps": -1, "max_time": None, "val_check_interval": None}
    return Namespace({**unset, "check_val_every_n_epoch": None, **given})


@pytest.mark.parametrize(
    ("given", "max_epochs"),
    [({}, 1), ({"max_steps": 5}, None), ({"max_time": "00:01:00:00"}, None), ({"max_epochs": 3}, 3)],
)
def test_a_run_without_an_end_has_one_epoch(given: dict[str, Any], max_epochs: int | None) -> None:
    config = trainer(**given)
    settle_lengths(config)
    assert config["max_epochs"] == max_epochs


@pytest.mark.parametrize(
    ("given", "every_n_epochs"),
    [
        ({}, 1),
        ({"val_check_interval": 0.5}, 1),
        ({"val_check_interval": 20}, None),
        ({"val_check_interval": 20, "check_val_every_n_epoch": 2}, 2),
    ],
)
def test_an_interval_in_steps_counts_over_epochs(given: dict[str, Any], every_n_epochs: int | None) -> None:
    config = trainer(**given)
    settle_lengths(config)
    assert config["check_val_every_n_epoch"] == every_n_epochs


def test_rollout_stands_first() -> None:
    empty, rollout, offload = EmptyCacheAfterUpdate(), VLLMRollout(), OffloadDuringRollout()
    assert order_callbacks([empty, rollout, offload]) == [rollout, empty, offload]


def test_two_runs_of_one_second_have_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "20300101-120000")
    names = []
    for _ in range(3):
        names.append(new_run_folder())
        Path(names[-1]).mkdir(parents=True)
    assert names == ["runs/20300101-120000", "runs/20300101-120000_2", "runs/20300101-120000_3"]


def test_externally_launched_ranks_require_default_root_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    for name, value in values.items() | {("TORCHELASTIC_RUN_ID", "1")}:
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"Set it, such as --trainer.default_root_dir runs/first"):
        new_run_folder()


def test_expand_home_reaches_every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    callbacks = [Namespace(class_path="ModelCheckpoint", init_args=Namespace(dirpath="~/kept"))]
    config = Namespace(trainer=Namespace(default_root_dir="~/runs/a", callbacks=callbacks), data={"train": "~"})
    config["model"] = Namespace(stop=["~/", "~5", "a/~/b"])
    expand_home(config)
    assert config["trainer"]["default_root_dir"] == "/home/ada/runs/a"
    assert callbacks[0].init_args.dirpath == "/home/ada/kept"
    assert config["data"] == {"train": "/home/ada"}
    assert config["model"]["stop"] == ["/home/ada/", "~5", "a/~/b"]


def test_files_are_saved_atomically_unless_told_otherwise() -> None:
    (added,) = add_checkpoint_io(None, "auto")
    assert isinstance(added, AtomicCheckpointIO)
    own, other = TorchCheckpointIO(), LightningEnvironment()
    assert add_checkpoint_io([own, other], "auto") == [own, other]
    assert add_checkpoint_io(other, "auto")[0] is other and len(add_checkpoint_io(other, "auto")) == 2
    assert add_checkpoint_io(None, SingleDeviceStrategy("cpu", checkpoint_io=own)) == []


def test_error_summary_keeps_only_key_and_reason() -> None:
    message = (
        'Parser key "model":\n  Does not validate against any of the Union subtypes\n'
        "  Subtypes: [<class 'rlightning.module.rl_module.RLModule'>, <class 'NoneType'>]\n  Errors:\n"
        "    - Problem with given class_path 'rlightning.algorithms.GRPO':\n"
        "        Parser key \"lr\":\n          Expected a <class 'float'>. Got value: [1]\n"
        "    - Expected a <class 'NoneType'>\n  Given value type: <class 'dict'>\n  Given value: {}"
    )
    assert summarise(message, None) == "model.lr: expected float, got '[1]'"
