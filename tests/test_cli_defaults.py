"""What the command line settles before it builds anything."""

from pathlib import Path
from typing import Any

import pytest
from jsonargparse import Namespace
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy

from rlightning.callbacks import EmptyCacheAfterUpdate, OffloadDuringRollout, VLLMRollout
from rlightning.cli import (
    add_checkpoint_io,
    check_checkpoints,
    find_last,
    new_run_folder,
    rollout_first,
    settle_lengths,
    summarise,
)
from rlightning.distributed.checkpoint_io import AtomicCheckpointIO
from rlightning.errors import ConfigError


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


def test_a_rollout_that_is_listed_by_hand_stands_first() -> None:
    empty, rollout, offload = EmptyCacheAfterUpdate(), VLLMRollout(), OffloadDuringRollout()
    assert rollout_first([empty, rollout, offload]) == [rollout, empty, offload]


def test_two_runs_of_one_second_have_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "20300101-120000")
    names = []
    for _ in range(3):
        names.append(new_run_folder())
        Path(names[-1]).mkdir(parents=True)
    assert names == ["runs/20300101-120000", "runs/20300101-120000_2", "runs/20300101-120000_3"]


def test_ranks_that_were_launched_from_outside_must_be_told_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    for name, value in values.items() | {("TORCHELASTIC_RUN_ID", "1")}:
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"Set it, such as --trainer.default_root_dir runs/first"):
        new_run_folder()


def test_a_folder_with_checkpoints_takes_no_new_run(tmp_path: Path) -> None:
    check_checkpoints("fit", tmp_path, None)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").touch()
    with pytest.raises(ConfigError, match="holds a run's checkpoints already"):
        check_checkpoints("fit", tmp_path, None)
    check_checkpoints("fit", tmp_path, "last")
    check_checkpoints("validate", tmp_path, None)
    check_checkpoints("fit", tmp_path, str(tmp_path / "checkpoints" / "last.ckpt"))


@pytest.mark.parametrize("command", ["fit", "validate"])
def test_a_checkpoint_that_nobody_can_find(command: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ckpt_path=last, but there is no checkpoint in .* Set trainer"):
        check_checkpoints(command, tmp_path, "last")
    with pytest.raises(ConfigError, match=r"gone\.ckpt: there is no such file"):
        check_checkpoints(command, tmp_path, str(tmp_path / "gone.ckpt"))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "epoch=0-step=2.ckpt").touch()
    with pytest.raises(ConfigError, match=r"ckpt_path=best.*only the run itself knew.* such as .*step=2\.ckpt"):
        check_checkpoints(command, tmp_path, "best")


def test_last_is_what_a_crash_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rlightning")
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "last.ckpt").touch()
    assert find_last(tmp_path) == "last"
    assert not any(record.name.startswith("rlightning") for record in caplog.records)
    # in the middle of being replaced
    (checkpoints / "last.ckpt").rename(checkpoints / "last.ckpt.previous")
    for ckpt_path in ("last", str(checkpoints / "last.ckpt")):
        check_checkpoints("fit", tmp_path, ckpt_path)
    with pytest.raises(ConfigError, match="holds a run's checkpoints already"):
        check_checkpoints("fit", tmp_path, None)
    assert find_last(tmp_path) == str(checkpoints / "last.ckpt.previous")
    # a link that leads to what has been removed
    (checkpoints / "last.ckpt.previous").unlink()
    (checkpoints / "last.ckpt").symlink_to("epoch=0-step=2.ckpt")
    (checkpoints / "epoch=0-step=4.ckpt").touch()
    check_checkpoints("fit", tmp_path, "last")
    assert find_last(tmp_path) == str(checkpoints / "epoch=0-step=4.ckpt")
    assert caplog.messages[-1].endswith("goes on from the newest checkpoint, epoch=0-step=4.ckpt.")


def test_files_are_saved_atomically_unless_told_otherwise() -> None:
    (added,) = add_checkpoint_io(None, "auto")
    assert isinstance(added, AtomicCheckpointIO)
    own, other = TorchCheckpointIO(), LightningEnvironment()
    assert add_checkpoint_io([own, other], "auto") == [own, other]
    assert add_checkpoint_io(other, "auto")[0] is other and len(add_checkpoint_io(other, "auto")) == 2
    assert add_checkpoint_io(None, SingleDeviceStrategy("cpu", checkpoint_io=own)) == []


def test_the_gist_of_a_long_message_is_its_key_and_its_reason() -> None:
    message = (
        'Parser key "model":\n  Does not validate against any of the Union subtypes\n'
        "  Subtypes: [<class 'rlightning.module.RLModule'>, <class 'NoneType'>]\n  Errors:\n"
        "    - Problem with given class_path 'rlightning.algorithms.GRPO':\n"
        "        Parser key \"lr\":\n          Expected a <class 'float'>. Got value: [1]\n"
        "    - Expected a <class 'NoneType'>\n  Given value type: <class 'dict'>\n  Given value: {}"
    )
    assert summarise(message, None) == "model.lr: expected float, got '[1]'"
