"""A controller makes no CUDA context beside a real GPU: there is no room for one, and the run ends well."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from controller_run import RAY_OPTIONS, Record
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from rank_processes import finish, start_controller
from tiny import GenerateInWorkers, bare_trainer, make_data, make_grpo, save_model

from rlightning.callbacks import CompletionsTable, ControllerMode, RunReport, SaveHF, Throughput
from rlightning.controller import RayController
from rlightning.hooks import RLCallback
from rlightning.parallel import FSDP

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

MAX_STEPS = 4
LEFT_BYTES = 100 << 20
"""Of the GPU's memory; a CUDA context takes some hundred MiB."""


class FillDevice(RLCallback):
    """Takes what is free of the worker's GPU, once all that a run does has been done and has what memory it needs."""

    runs_in = "workers"

    def __init__(self, seen: Path) -> None:
        self.seen = seen
        self.held: torch.Tensor | None = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != 1:
            return
        free = None
        if module.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(module.device)
            self.held = torch.empty(free - LEFT_BYTES, dtype=torch.uint8, device=module.device)
            free, _ = torch.cuda.mem_get_info(module.device)
        self.seen.write_text(json.dumps({"device": module.device.type, "pid": os.getpid(), "free": free}))


class Touch(RLCallback):
    """Does in the controller what it must not, when the GPU is full."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            torch.zeros(1, device="cuda")


class ListProcesses(RLCallback):
    """Notes which processes nvidia-smi sees on GPUs in the last step."""

    def __init__(self) -> None:
        self.pids: list[int] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == MAX_STEPS:
            self.pids = processes_on_gpus()


def processes_on_gpus() -> list[int]:
    """Their numbers; nothing without nvidia-smi, or where that knows no processes."""
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    except FileNotFoundError:
        return []
    return [int(line) for line in printed.split() if line.isdecimal()]


def run(folder: Path, accelerator: str, how: str) -> dict[str, Any]:
    """GRPO by a controller with one worker, whose GPU has no room for another CUDA context from the second step on.

    A controller that makes one then fails, as a "touching" one does in the third step. On the CPU the same run fills
    nothing. No engine needs memory: completions are sampled from the actor.
    """
    seed_everything(0)
    module = make_grpo(folder / "model", lr=1e-2, gradient_checkpointing=False, compile=False)
    record, listed = Record(), ListProcesses()
    trainer = bare_trainer(
        folder / "run",
        MAX_STEPS,
        ControllerMode(),
        GenerateInWorkers(),
        FillDevice(folder / "worker.json"),
        *([Touch()] if how == "touching" else []),
        record,
        listed,
        *(Throughput(), RunReport(), CompletionsTable(1), SaveHF(every_n_steps=1)),
        ModelCheckpoint(folder / "checkpoints", "{step}", every_n_train_steps=1, save_top_k=-1, save_last="link"),
        strategy=RayController(num_workers=1, worker_strategy=FSDP(), accelerator=accelerator, ray_options=RAY_OPTIONS),
        logger=CSVLogger(folder / "run"),
        enable_checkpointing=True,
        val_check_interval=1,
        check_val_every_n_epoch=None,
    )
    trainer.fit(module, make_data(folder, validation=str(folder / "sums.jsonl")))
    return {
        "is_initialized": torch.cuda.is_initialized(),
        "pid": os.getpid(),
        "on_gpus": listed.pids,
        "global_step": trainer.global_step,
        "num_logged": len(record.steps),
        "num_validations": len(record.validations),
        "num_gpus": torch.cuda.device_count(),
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, and one GPU that controller and worker both see."""
    save_model(tmp_path / "model")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])
    return tmp_path


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_controller_run_fits_beside_full_gpu(folder: Path) -> None:
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
