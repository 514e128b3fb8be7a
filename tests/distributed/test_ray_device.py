"""A controller leaves CUDA alone from the first line to the last, where a device is there."""

import json
from pathlib import Path
from typing import Any

import pytest
from controller_process import finish, start_controller
from sft_run import SIZES, write_rows
from tiny import save_model

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parent / "controller_device_run.py"


@pytest.mark.parametrize("how", ["controller", "alone"])
def test_a_whole_controllers_run_touches_no_device(how: str, tmp_path: Path) -> None:
    """Training, validation, saving, logging. A run of one process shows that a touch is seen."""
    save_model(tmp_path / "model", **SIZES)
    write_rows(tmp_path)
    finish([start_controller(SCRIPT, str(tmp_path), how)])
    outcome: dict[str, Any] = json.loads((tmp_path / f"{how}.json").read_text())
    assert (tmp_path / how / "checkpoints" / "last.ckpt").exists()
    assert list((tmp_path / how).rglob("metrics.csv"))
    if how == "controller":
        assert outcome == {"touched": [], "is_initialized": False}
    else:
        assert any("isolate_rng" in stack for stack in outcome["touched"])
