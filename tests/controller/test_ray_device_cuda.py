"""A controller makes no CUDA context beside a real GPU: there is no room for one, and the run ends well."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from controller_full_device_run import LEFT_BYTES, MAX_STEPS, run
from rank_processes import finish, start_controller
from tiny import save_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, and one GPU that controller and worker both see."""
    save_model(tmp_path / "model")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])
    return tmp_path


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_a_whole_run_needs_no_room_for_the_controller(folder: Path) -> None:
    """Training, validation, saving, logging, all of it after the first step beside a full GPU."""
    (outcome,) = finish([start_controller(run, folder, "gpu", "idle")], timeout=280)
    worker = read(folder / "worker.json")
    assert worker["device"] == "cuda" and worker["free"] <= LEFT_BYTES
    assert outcome["num_gpus"] == 1 and outcome["is_initialized"] is False
    assert outcome["global_step"] == outcome["num_logged"] == MAX_STEPS
    assert outcome["num_validations"] == MAX_STEPS + 1  # one before the first step
    steps = [f"step={step}.ckpt" for step in range(1, MAX_STEPS + 1)]
    assert {path.name for path in (folder / "checkpoints").iterdir()} >= {*steps, "last.ckpt"}
    assert list((folder / "run").rglob("metrics.csv"))
    if worker["pid"] in outcome["on_gpus"]:  # nvidia-smi numbers processes as this machine does
        assert outcome["pid"] not in outcome["on_gpus"]


def test_there_was_no_room_for_a_context(folder: Path) -> None:
    """The same run fails as soon as its controller makes one."""
    call = start_controller(run, folder, "gpu", "touching")
    with pytest.raises(AssertionError, match=r'(?s)zeros\(1, device="cuda"\).*out of memory'):
        finish([call], timeout=280)
    assert read(folder / "worker.json")["free"] <= LEFT_BYTES
    assert not call.returned.exists()
