"""Runs under a controller in which a worker fails; what became of each goes to ``FOLDER/outcomes.json``.

python controller_failures_run.py FOLDER
"""

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from controller_run import RAY_OPTIONS
from lightning.pytorch.callbacks import ModelCheckpoint
from sft_run import CountSteps, train

from rlightning.distributed import FSDP, RayController
from rlightning.errors import ConfigError
from rlightning.hooks import RLCallback


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
            case "mistake":
                raise ConfigError("value=3 is wrong. Use 4.")
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)


class Witness(CountSteps):
    """Notes the end that a run's callbacks are told of."""

    def __init__(self) -> None:
        super().__init__()
        self.exceptions: list[str] = []
        self.process_ids: set[int] = set()
        self.begun: list[int] = []

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.begun.append(trainer.global_step)
        self.process_ids |= set(trainer.strategy.group.process_ids())

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
) -> dict[str, Any]:
    """One run, and what is left of it; ``dies_again``: also rank 0, in the fourth step."""
    mark = folder / f"{name}.failed"
    witness = Witness()
    callbacks: list[Any] = [FailOnce(mark, kind), witness]
    if dies_again:
        callbacks.append(FailOnce(folder / f"{name}.failed-again", "die", rank=0, version=3))
    if checkpoint is not None:
        callbacks.append(checkpoint)
    strategy = RayController(
        num_workers=2, worker_strategy=FSDP(), accelerator="cpu", max_restarts=max_restarts, ray_options=RAY_OPTIONS
    )
    error, text, global_step = "", "", 0
    try:
        saves = checkpoint is not None
        _, trainer = train(folder, 4, *callbacks, ckpt_path=ckpt_path, strategy=strategy, enable_checkpointing=saves)
        global_step = trainer.global_step
    except Exception as caught:
        error, text = type(caught).__name__, "".join(traceback.format_exception(caught))
    ended = time.time()
    strategy.close()
    return {
        "error": error,
        "text": text,
        "seconds": ended - float(mark.read_text()) if mark.exists() else 0.0,
        "exceptions": witness.exceptions,
        "global_step": global_step,
        "num_steps": witness.num_steps,
        "begun": witness.begun,
        "alive": [pid for pid in witness.process_ids if is_alive(pid)],
    }


def is_alive(pid: int) -> bool:
    """Whether a process goes on, after a minute."""
    for _ in range(600):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX":
                time.sleep(0.1)
                continue
        return False
    return True


def main() -> None:
    """All of them."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    whole = folder / "whole"
    outcomes = {
        "raise": run(folder, "raise", "raise"),
        "mistake": run(folder, "mistake", "mistake"),
        "die": run(folder, "die", "die"),
        "die-without-checkpoint": run(folder, "die-without-checkpoint", "die", max_restarts=1),
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
    (folder / "outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
