"""Many steps under a controller with 2 x 2 workers; each process writes what it holds to ``FOLDER/RUN/NAME.levels``.

    python controller_leaks_run.py FOLDER

The runs are "with" RemotizeOnHeadOnly, and a short one "without". The controller reads each step's batch, and half a
megabyte besides.
"""

import sys
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
from controller_run import RAY_OPTIONS
from equivalence_run import RandomGenerator
from rtensor_training import resident_bytes
from tiny import UseGenerator, bare_trainer, make_data, share_of_ones

from rlightning.algorithms import GRPO
from rlightning.callbacks import RemotizeOnHeadOnly
from rlightning.distributed import FSDP, RayController
from rlightning.distributed.tensor_store import live_bytes, live_entries
from rlightning.hooks import RLCallback
from rlightning.rewards import RewardFunction

NUM_STEPS = 200
PAYLOAD_BYTES = 1 << 19
MEASURED_EVERY = 50
"""Steps between two looks at the resident memory, which take a while."""


class WithPayload(GRPO):
    """Has something large to tell."""

    def payload(self, step: int) -> torch.Tensor:
        return torch.full((PAYLOAD_BYTES // 4,), float(step))


class Levels(RLCallback):
    """Notes live entries and bytes at the end of a step, those left when the next begins, and the resident memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.in_step = (0, 0)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.in_step = live_entries(), live_bytes()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        deadline = monotonic() + 10
        while live_entries() and monotonic() < deadline:  # others let go meanwhile
            sleep(0.005)
        resident = resident_bytes() if trainer.global_step % MEASURED_EVERY == 0 else 0
        with (self.folder / f"{self.name(trainer)}.levels").open("a") as file:
            file.write(f"{trainer.global_step} {self.in_step[0]} {self.in_step[1]} ")
            file.write(f"{live_entries()} {live_bytes()} {resident}\n")

    def name(self, trainer: Any) -> str:
        return "controller"


class WorkerLevels(Levels):
    """The same, of a worker."""

    runs_in = "workers"

    def name(self, trainer: Any) -> str:
        return f"worker{trainer.global_rank}"


class GenerateInWorkers(UseGenerator):
    """Samples from the actor."""

    runs_in = "workers"


class Reads(RLCallback):
    """Looks into what the workers have stored."""

    def on_update_end(self, trainer: Any, module: Any, batch: Any) -> None:
        assert batch.rewards.shape == (batch.num_sequences,) == (8,)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        payload = trainer.strategy.call("payload", trainer.global_step)
        assert payload.nbytes == PAYLOAD_BYTES and payload[-1] == trainer.global_step


def train(folder: Path, run: str, num_steps: int) -> None:
    """One run; the last step's traces are looked for when another begins."""
    module = WithPayload(
        str(folder / "model"),
        rewards=[RewardFunction(share_of_ones)],
        prompts_per_step=4,
        samples_per_prompt=2,
        lr=1e-3,
        kl_coef=0.0,
        validate_first=False,
    )
    levels = folder / run
    levels.mkdir()
    strategy = RayController(
        num_workers=4,
        worker_strategy=FSDP(tensor_parallel_size=2),
        accelerator="cpu",
        ray_options={**RAY_OPTIONS, "num_cpus": 5},
    )
    own = [RemotizeOnHeadOnly()] if run == "with" else []
    watching = [Reads(), Levels(levels), WorkerLevels(levels)]
    trainer = bare_trainer(
        folder, num_steps + 1, GenerateInWorkers(RandomGenerator), *own, *watching, strategy=strategy, logger=False
    )
    trainer.fit(module, make_data(folder))
    strategy.close()


def main() -> None:
    """Both runs."""
    torch.set_num_threads(1)
    train(Path(sys.argv[1]), "with", NUM_STEPS)
    train(Path(sys.argv[1]), "without", 5)


if __name__ == "__main__":
    main()
