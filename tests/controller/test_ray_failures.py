"""Runs under a controller whose worker raises an error or dies: how they end."""

import os
import re
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from controller_run import make_strategy, process_ids
from lightning.pytorch.callbacks import ModelCheckpoint
from rank_processes import finish, start_controller
from sft_run import SIZES, CountSteps, train, write_rows
from tiny import save_model
from waiting import still_running

from rlightning import intervals
from rlightning.controller.strategy import find_last
from rlightning.errors import RewardError, find_run_error
from rlightning.hooks import RLCallback
from rlightning.parallel.checkpoint_folder import read_whole

pytestmark = [pytest.mark.processes, pytest.mark.slow]


class FailOnce(RLCallback):
    """Fails on one rank in the middle of a step, by default the third, while the others go on to a collective."""

    runs_in = "workers"

    def __init__(self, mark: Path, kind: str, *, rank: int = 1, version: int = 2) -> None:
        self.mark = mark
        self.kind = kind
        self.rank, self.version = rank, version

    @property
    def state_key(self) -> str:
        return f"{type(self).__name__}{self.version}"

    def on_update_start(self, trainer: Any, module: Any, batch: Any) -> None:
        if trainer.global_rank != self.rank or module.weight_version != self.version or self.mark.exists():
            return
        self.mark.write_text(str(time.time()))
        match self.kind:
            case "raise":
                raise ValueError("boom in a worker")
            case "foreseen":
                raise RewardError("7 of 8 samples have no reward.", "the first failure's trace")
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)


class Witness(CountSteps):
    """Notes the end that a run's callbacks are told of."""

    def __init__(self) -> None:
        super().__init__()
        self.exceptions: list[str] = []
        self.process_ids: set[int] = set()
        self.begun: list[int] = []

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.begun.append(trainer.global_step)
        self.process_ids |= set(process_ids(trainer.strategy.group))

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.exceptions.append(type(exception).__name__)


def save_each(folder: Path, num_steps: int) -> ModelCheckpoint:
    """A checkpoint each so many steps, of which all stay."""
    return ModelCheckpoint(folder, "{step}", every_n_train_steps=num_steps, save_top_k=-1)


def run(
    folder: Path,
    name: str,
    kind: str,
    *,
    max_restarts: int = 0,
    checkpoint: ModelCheckpoint | None = None,
    ckpt_path: Path | None = None,
    dies_again: bool = False,
    num_workers: int = 2,
    **own: Any,
) -> dict[str, Any]:
    """One run, and what is left of it.

    Args:
        folder: has the model and the rows.
        name: of the run.
        kind: of failure, see FailOnce.
        max_restarts: of the strategy.
        checkpoint: saves.
        ckpt_path: to begin at.
        dies_again: also rank 0, in the fourth step.
        num_workers: of which the last fails.
        own: arguments of the workers' FSDP.
    """
    mark = folder / f"{name}.failed"
    witness = Witness()
    callbacks: list[Any] = [FailOnce(mark, kind, rank=num_workers - 1), witness]
    if dies_again:
        callbacks.append(FailOnce(folder / f"{name}.failed-again", "die", rank=0, version=3))
    if checkpoint is not None:
        callbacks.append(checkpoint)
    strategy: Any = make_strategy(num_workers, max_restarts, **own)
    error, text, line, global_step = "", "", "", 0
    try:
        saves = checkpoint is not None
        _, trainer = train(folder, 4, *callbacks, ckpt_path=ckpt_path, strategy=strategy, enable_checkpointing=saves)
        global_step = trainer.global_step
    except Exception as caught:
        error, text = type(caught).__name__, "".join(traceback.format_exception(caught))
        foreseen = find_run_error(caught)
        line = "" if foreseen is None else foreseen.line
    ended = time.time()
    strategy.close()
    return {
        "error": error,
        "text": text,
        "line": line,
        "seconds": ended - float(mark.read_text()) if mark.exists() else 0.0,
        "exceptions": witness.exceptions,
        "global_step": global_step,
        "num_steps": witness.num_steps,
        "begun": witness.begun,
        "alive": still_running(witness.process_ids),
    }


def run_all(folder: Path) -> dict[str, Any]:
    """Return the outcome of each run, by name."""
    whole = folder / "whole"
    intervals.WAIT_REPORT_DELAY = intervals.SILENT_AFTER = 2.0
    return {
        "raise": run(folder, "raise", "raise"),
        "foreseen": run(folder, "foreseen", "foreseen"),
        "die": run(folder, "die", "die"),
        "die-without-checkpoint": run(folder, "die-without-checkpoint", "die", max_restarts=1),
        "stop": run(folder, "stop", "stop", num_workers=1, barrier_timeout=5.0),
        "restart": run(
            folder, "restart", "die", max_restarts=2, dies_again=True, checkpoint=save_each(folder / "restart", 1)
        ),
        "too-often": run(
            folder, "too-often", "die", max_restarts=1, dies_again=True, checkpoint=save_each(folder / "too-often", 1)
        ),
        "whole": run(folder, "whole", "none", checkpoint=save_each(whole, 1)),
        "rollback": run(
            folder,
            "rollback",
            "die",
            max_restarts=1,
            checkpoint=save_each(whole, 100),
            ckpt_path=whole / "step=1.ckpt",
        ),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("failures")
    save_model(folder / "model", **SIZES)
    write_rows(folder)
    return folder


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Any]:
    found: dict[str, Any]
    (found,) = finish([start_controller(run_all, folder)])
    return found


def test_worker_exception_reaches_user_once_with_traceback(outcomes: dict[str, Any]) -> None:
    outcome = outcomes["raise"]
    assert outcome["error"] == "WorkerError" and outcome["exceptions"] == ["WorkerError"]
    assert "worker 1 failed: ValueError: boom in a worker" in outcome["text"]
    assert outcome["text"].count("in on_update_start") == 1
    assert outcome["num_steps"] == 2


def test_foreseen_worker_error_stays_foreseen(outcomes: dict[str, Any]) -> None:
    outcome = outcomes["foreseen"]
    assert outcome["error"] == "ForeseenWorkerError"
    assert outcome["line"] == "worker 1: 7 of 8 samples have no reward."
    assert outcome["text"].count("in on_update_start") == 1 and "the first failure's trace" in outcome["text"]


@pytest.mark.parametrize("name", ["die", "die-without-checkpoint"])
def test_a_worker_that_is_killed_ends_the_step(name: str, outcomes: dict[str, Any]) -> None:
    """Rank 0 waits in a collective then, whose own timeout is half an hour."""
    outcome = outcomes[name]
    assert outcome["error"] == "WorkerDiedError" and outcome["exceptions"] == ["WorkerDiedError"]
    assert "worker 1 of 2 died" in outcome["text"]
    assert outcome["seconds"] < 400


def test_worker_that_is_stopped_ends_the_run(outcomes: dict[str, Any]) -> None:
    """The only one, so that no other rank can tell."""
    outcome = outcomes["stop"]
    assert outcome["error"] == "WorkerDiedError" and outcome["exceptions"] == ["WorkerDiedError"]
    found = re.search(r"worker 0 of 1 hangs: its process has answered nothing for (\d+) s\.", outcome["text"])
    assert found is not None and int(found[1]) >= 5  # the timeout, when it was next looked at


def test_no_worker_is_left_behind(outcomes: dict[str, Any]) -> None:
    assert {name: outcome["alive"] for name, outcome in outcomes.items()} == {name: [] for name in outcomes}


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


def test_death_beyond_restart_budget_ends_run(outcomes: dict[str, Any]) -> None:
    outcome = outcomes["too-often"]
    assert outcome["error"] == "WorkerDiedError" and "worker 0 of 2 died" in outcome["text"]
    assert outcome["begun"] == [0, 1, 2, 2, 3]


def test_restart_before_first_save_resumes_given_checkpoint(outcomes: dict[str, Any]) -> None:
    """A rollback to step 1, beside a checkpoint of step 4: the third step kills a worker, and all begins anew at 1."""
    outcome = outcomes["rollback"]
    assert (outcome["error"], outcome["global_step"]) == ("", 4)
    assert outcome["begun"] == [1, 2, 1, 2, 3]


def test_restart_uses_last_intact_checkpoint_of_own_run(tmp_path: Path) -> None:
    own, later, broken, gone = (tmp_path / f"step={step}.ckpt" for step in (1, 2, 3, 4))
    for path in (own, later, tmp_path / "last.ckpt"):  # the last one is of another run
        path.write_bytes(b"")
    broken.mkdir()
    assert find_last([]) is None
    assert find_last([own]) == own
    assert find_last([own, later, broken, gone]) == later


def test_restart_falls_back_to_previous_after_interrupted_save(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt.previous").write_bytes(b"")
    assert find_last([tmp_path / "last.ckpt"]) == tmp_path / "last.ckpt.previous"
