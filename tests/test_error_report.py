"""How the command line says that a run has failed, and which errors are foreseen."""

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cli_project import fit_here
from lightning.fabric.utilities.exceptions import MisconfigurationException

from rlightning.controller.commands import ForeseenWorkerError, WorkerDiedError
from rlightning.controller.tensor_store import StoreFullError, TensorLostError
from rlightning.error_report import FILE, SHOW_TRACE, exit_code, set_run_folder, show_error
from rlightning.errors import (
    ConfigError,
    DeviceMemoryError,
    EngineDiedError,
    EngineError,
    EngineStartError,
    HostError,
    RequestRefusedError,
    RewardError,
    RunError,
    find_run_error,
)
from rlightning.parallel.barrier import BarrierError
from rlightning.parallel.rank_store import StoreError

KINDS: list[type[RunError]] = [
    *(BarrierError, ConfigError, DeviceMemoryError, EngineDiedError, EngineError, EngineStartError),
    *(ForeseenWorkerError, HostError, RequestRefusedError, RewardError, StoreError, StoreFullError, TensorLostError),
    WorkerDiedError,
]


@pytest.fixture(autouse=True)
def no_folder() -> Iterator[None]:
    yield
    set_run_folder(None)


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """The error with the trace of a place."""
    try:
        raise error from cause
    except BaseException as caught:
        return caught


@pytest.mark.parametrize("kind", KINDS)
def test_error_of_ours_is_foreseen(kind: type[RunError]) -> None:
    error = kind("what happened")
    assert find_run_error(error) is error
    assert exit_code(error) == (2 if issubclass(kind, ConfigError) else 1)


def test_foreseen_error_is_one_line_with_trace_in_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_run_folder(tmp_path / "run")
    error = RewardError("3 of 4 samples\nhave no reward. Correct the function.", "Traceback of the function's")
    show_error(raised(error, KeyError("inner")))
    assert capsys.readouterr().err == (
        f"The trace of this error is in {tmp_path / 'run' / FILE}.\n"
        "error: 3 of 4 samples have no reward. Correct the function.\n"
    )
    kept = (tmp_path / "run" / FILE).read_text()
    assert "KeyError: 'inner'" in kept and "in raised" in kept and "Traceback of the function's" in kept


def test_mistake_before_the_run_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_run_folder(tmp_path / "run")
    show_error(raised(ConfigError("width=3 is odd. Use 4.")))
    assert capsys.readouterr().err == "error: width=3 is odd. Use 4.\n"
    assert not (tmp_path / "run").exists()


def test_variable_shows_the_trace_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHOW_TRACE, "1")
    show_error(raised(EngineError("The engine died.", "its log's end")))
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback") and "its log's end" in shown and shown.endswith("\nerror: The engine died.\n")


def test_trace_that_has_no_place_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for folder in (None, tmp_path / "file"):
        set_run_folder(folder)
        show_error(raised(EngineError("The engine died.", "its log's end")))
        shown = capsys.readouterr().err
        assert shown.startswith("Traceback") and shown.endswith("its log's end\nerror: The engine died.\n")


def test_other_error_keeps_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    show_error(raised(ValueError("boom")))
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback") and shown.endswith("ValueError: boom\n")


@pytest.mark.long
def test_errors_that_libraries_raise_are_told_as_ours() -> None:
    full = find_run_error(OSError(errno.ENOSPC, "No space left on device", "runs/a/checkpoints"))
    assert full is not None and full.line == (
        "[Errno 28] No space left on device: 'runs/a/checkpoints'. Make room there."
    )
    import wandb

    login = find_run_error(wandb.errors.UsageError("api_key not configured.\nRun `wandb login`."))
    assert login is not None and login.exit_code == 2
    way_out = "Without its server, set WANDB_MODE=offline."
    assert str(login) == f"Weights & Biases: api_key not configured. Run `wandb login`. {way_out}"
    slow = find_run_error(wandb.errors.CommError("Run initialization has timed out.\nSettings(\n" + "x" * 1000))
    assert slow is not None and slow.line.startswith("Weights & Biases: Run initialization has timed out. Settings( x")
    assert slow.line.endswith(f"x. {way_out}") and "\n" not in slow.line and len(slow.line) < 400
    files = find_run_error(OSError(errno.EMFILE, "Too many open files"))
    assert isinstance(files, HostError) and files.line.endswith("ulimit -n 65536.")
    memory = find_run_error(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert isinstance(memory, DeviceMemoryError)
    assert memory.line.startswith("CUDA out of memory. Tried to allocate 2.00 GiB. Lower model.max_tokens_per_micro")
    assert exit_code(MisconfigurationException("no such device")) == 2
    assert find_run_error(OSError(errno.ENOENT, "No such file")) is None
    assert find_run_error(raised(RuntimeError("wrapped"), ConfigError("lr=x"))) is not None


OWN = """\

class Unrewarded(SFT):
    def training_step(self, prompts, batch_idx):
        raise RewardError("7 of 8 samples have no reward.", "the first failure's trace")
"""


@pytest.mark.long
def test_error_in_training_ends_in_its_line(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "failing.py").write_text(
        "from rlightning.algorithms import SFT\nfrom rlightning.errors import RewardError\n" + OWN
    )
    code, shown = fit_here(
        capsys, "--config", "run.yaml", "--model", "failing.Unrewarded", "--trainer.default_root_dir", "run"
    )
    assert code == 1
    assert "Traceback" not in shown
    assert shown.splitlines()[-2:] == [
        f"The trace of this error is in run/{FILE}.",
        "error: 7 of 8 samples have no reward.",
    ]
    kept = (project / "run" / FILE).read_text()
    assert "in training_step" in kept and "the first failure's trace" in kept
