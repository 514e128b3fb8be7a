"""What becomes of a run under a controller when a worker raises or dies."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from controller_process import finish, start_controller
from sft_run import SIZES, write_rows
from tiny import save_model

from rlightning.distributed.checkpoint_folder import read_whole
from rlightning.distributed.controller_launcher import find_last

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "controller_failures_run.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("failures")
    save_model(folder / "model", **SIZES)
    write_rows(folder)
    finish([start_controller(SCRIPT, str(folder))])
    return folder


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "outcomes.json").read_text())
    return found


@pytest.mark.processes
def test_an_exception_reaches_the_user_with_rank_and_traceback_once(outcomes: dict[str, Any]) -> None:
    outcome = outcomes["raise"]
    assert outcome["error"] == "WorkerError" and outcome["exceptions"] == ["WorkerError"]
    assert "worker 1 failed: ValueError: boom in a worker" in outcome["text"]
    assert outcome["text"].count("in on_update_start") == 1
    assert outcome["num_steps"] == 2


@pytest.mark.processes
def test_a_mistake_is_one_in_the_controller_too(outcomes: dict[str, Any]) -> None:
    assert outcomes["mistake"]["error"] == "ConfigError"
    assert outcomes["mistake"]["text"].rstrip().endswith("ConfigError: value=3 is wrong. Use 4.")


@pytest.mark.processes
@pytest.mark.parametrize("name", ["die", "die-without-checkpoint"])
def test_a_worker_that_is_killed_ends_the_step(name: str, outcomes: dict[str, Any]) -> None:
    """Rank 0 waits in a collective then, whose own timeout is half an hour."""
    outcome = outcomes[name]
    assert outcome["error"] == "WorkerDiedError" and outcome["exceptions"] == ["WorkerDiedError"]
    assert "worker 1 of 2 died" in outcome["text"]
    assert outcome["seconds"] < 60


@pytest.mark.processes
def test_no_worker_is_left_behind(outcomes: dict[str, Any]) -> None:
    assert {name: outcome["alive"] for name, outcome in outcomes.items()} == {name: [] for name in outcomes}


@pytest.mark.processes
def test_a_restart_goes_on_from_the_last_checkpoint(folder: Path, outcomes: dict[str, Any]) -> None:
    """Twice: rank 1 dies in the third step, rank 0 in the fourth."""
    outcome = outcomes["restart"]
    assert (outcome["error"], outcome["exceptions"]) == ("", [])
    assert outcome["begun"] == [0, 1, 2, 2, 3, 3]
    assert (outcome["global_step"], outcome["num_steps"]) == (4, 4)
    restarted, whole = (read_whole(folder / name / "step=4.ckpt") for name in ("restart", "whole"))
    for name, weight in whole["state_dict"].items():
        assert torch.equal(weight, restarted["state_dict"][name]), name
    assert restarted["PromptDataModule"] == whole["PromptDataModule"]


@pytest.mark.processes
def test_a_death_beyond_the_last_restart_ends_the_run(outcomes: dict[str, Any]) -> None:
    outcome = outcomes["too-often"]
    assert outcome["error"] == "WorkerDiedError" and "worker 0 of 2 died" in outcome["text"]
    assert outcome["begun"] == [0, 1, 2, 2, 3]


@pytest.mark.processes
def test_a_restart_before_the_first_checkpoint_keeps_to_the_one_that_was_given(outcomes: dict[str, Any]) -> None:
    """A rollback to step 1, beside a checkpoint of step 4: the third step kills a worker, and all begins anew at 1."""
    outcome = outcomes["rollback"]
    assert (outcome["error"], outcome["global_step"]) == ("", 4)
    assert outcome["begun"] == [1, 2, 1, 2, 3]


def test_a_restart_takes_the_last_of_its_own_checkpoints_that_is_whole(tmp_path: Path) -> None:
    own, later, broken, gone = (tmp_path / f"step={step}.ckpt" for step in (1, 2, 3, 4))
    for path in (own, later, tmp_path / "last.ckpt"):  # the last one is of another run
        path.write_bytes(b"")
    broken.mkdir()
    assert find_last([]) is None
    assert find_last([own]) == own
    assert find_last([own, later, broken, gone]) == later


def test_a_restart_finds_what_a_death_amid_a_save_has_left(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt.previous").write_bytes(b"")
    assert find_last([tmp_path / "last.ckpt"]) == tmp_path / "last.ckpt.previous"
