"""A whole run of SFT where a CUDA device seems to be there; whoever asks it for anything is written down.

python controller_device_run.py FOLDER (controller | alone)
"""

import json
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from controller_run import RAY_OPTIONS, train
from lightning.pytorch import seed_everything

from rlightning.callbacks import ControllerMode
from rlightning.distributed import FSDP, RayController

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


def main() -> None:
    """Run, and write what has touched the device."""
    folder, how = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    pretend_cuda()
    seed_everything(0)
    strategy: Any = "auto"
    if how == "controller":
        strategy = RayController(num_workers=2, worker_strategy=FSDP(), accelerator="cpu", ray_options=RAY_OPTIONS)
    train(folder / how, 2, strategy, callbacks=[ControllerMode()])
    outcome = {"touched": touched, "is_initialized": torch.cuda.is_initialized()}
    (folder / f"{how}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
