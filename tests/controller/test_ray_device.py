"""A controller leaves CUDA alone from the first line to the last, where a device is there."""

import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from controller_run import RAY_OPTIONS, train
from lightning.pytorch import seed_everything
from rank_processes import finish, start_controller
from sft_run import SIZES, write_rows
from tiny import save_model

from rlightning.callbacks import ControllerMode
from rlightning.controller import RayController
from rlightning.parallel import FSDP

pytestmark = pytest.mark.processes

touched: list[str] = []


def note_touch(*args: Any, **kwargs: Any) -> None:
    """In place of what makes a CUDA context."""
    touched.append("".join(traceback.format_stack(limit=6)))


def note_stream(*args: Any) -> Any:
    """In place of a stream, which torch's build for CUDA would ask the driver for."""
    note_touch()
    return SimpleNamespace(is_capturing=lambda: False)


def pretend_cuda() -> None:
    """Have torch find one device; whatever would begin to use it is noted instead."""
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda._lazy_init = note_touch
    torch.cuda.get_rng_state_all = lambda: [note_touch()]  # type: ignore[func-returns-value, list-item]
    torch.cuda.set_rng_state_all = note_touch
    torch.accelerator.current_stream = note_stream


def run(folder: Path, how: str) -> dict[str, Any]:
    """A run of SFT by a controller or alone; what has touched the device."""
    pretend_cuda()
    seed_everything(0)
    strategy: Any = "auto"
    if how == "controller":
        strategy = RayController(num_workers=2, worker_strategy=FSDP(), accelerator="cpu", ray_options=RAY_OPTIONS)
    train(folder / how, 2, strategy, callbacks=[ControllerMode()])
    return {"touched": touched, "is_initialized": torch.cuda.is_initialized()}


@pytest.mark.parametrize("how", ["controller", "alone"])
def test_a_whole_controllers_run_touches_no_device(how: str, tmp_path: Path) -> None:
    """Training, validation, saving, logging. A run of one process shows that a touch is seen."""
    save_model(tmp_path / "model", **SIZES)
    write_rows(tmp_path)
    (outcome,) = finish([start_controller(run, tmp_path, how)])
    assert (tmp_path / how / "checkpoints" / "last.ckpt").exists()
    assert list((tmp_path / how).rglob("metrics.csv"))
    if how == "controller":
        assert outcome == {"touched": [], "is_initialized": False}
    else:
        assert any("isolate_rng" in stack for stack in outcome["touched"])
