"""Steps of a controller with 2 x 2 workers leave nothing behind: twenty where only heads' results are seen to."""

import contextlib
import ctypes
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from controller_run import RAY_OPTIONS
from equivalence_run import RandomSampler
from rank_processes import finish, start_controller
from tiny import GenerateInWorkers, bare_trainer, make_algorithm, make_data, save_model
from waiting import wait_for

from rlightning.algorithms import GRPO
from rlightning.callbacks import RemotizeOnHeadOnly
from rlightning.controller import RayController, ray_controller
from rlightning.controller.tensor_store import live_bytes, live_entries
from rlightning.controller.worker_group import WorkerGroup
from rlightning.hooks import RLCallback
from rlightning.parallel import FSDP
from rlightning.rpc.worker_limits import resident_bytes

pytestmark = [pytest.mark.processes, pytest.mark.slow]

# Rank = 2 x data-parallel rank + tensor-parallel rank.
HEADS, OTHERS = ("worker0", "worker2"), ("worker1", "worker3")
PROCESSES = ("controller", *HEADS, *OTHERS)
RUNS = {"with, lax": 20, "without": 4, "without, lax": 4}
"""Steps of each run, with RemotizeOnHeadOnly or without, and under a lax controller or not."""
PAYLOAD_BYTES = 8 << 20
MEASURED_EVERY = 10
"""Steps between two looks at the resident memory, which take a while."""
AT_ONCE = {"free_objects_period_milliseconds": 0}
"""Ray's store has memory back when nobody refers to it. With its usual second, faster steps would use more of it."""


class LaxGroup(WorkerGroup):
    """Acknowledges the answers of data-parallel heads alone, which are all that it reads."""

    def _call(self, actor: Any, method: str, *arguments: Any, group: str = "commands") -> Any:
        if method == "forget" and self.actors.index(actor) % 2:
            return None
        return super()._call(actor, method, *arguments, group=group)


class WithPayload(GRPO):
    """Has something large to tell."""

    def payload(self, step: int) -> torch.Tensor:
        return torch.full((PAYLOAD_BYTES // 4,), float(step))


class Levels(RLCallback):
    """Notes live entries and bytes at the end of a step, those left when the next begins, and the resident memory.

    Args:
        folder: of the run.
        is_piling: whether a worker that is no head keeps a step's batch and its payload.
    """

    def __init__(self, folder: Path, is_piling: bool) -> None:
        self.folder = folder
        self.is_piling = is_piling
        self.in_step = (0, 0)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.in_step = live_entries(), live_bytes()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        kept = 2 * trainer.global_step if self.is_piling and self.name(trainer) in ("worker1", "worker3") else 0
        with contextlib.suppress(AssertionError):
            wait_for(lambda: live_entries() <= kept, 60)  # others let go meanwhile
        resident = measure_memory() if trainer.global_step % MEASURED_EVERY == 0 else 0
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


class Reads(RLCallback):
    """Looks into what the workers have stored."""

    def on_update_end(self, trainer: Any, module: Any, batch: Any) -> None:
        assert batch.rewards.shape == (batch.num_sequences,) == (8,)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        payload = trainer.strategy.call("payload", trainer.global_step)
        assert payload.nbytes == PAYLOAD_BYTES and payload[-1] == trainer.global_step


def measure_memory() -> int:
    """Of this process, what it has mapped of Ray's store included, but not what its allocator keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes(os.getpid())


def train(folder: Path, run: str, num_steps: int) -> None:
    """One run; the last step's traces are looked for when another begins."""
    module = make_algorithm(WithPayload, folder / "model", kl_coef=0.0, validate_first=False)
    levels = folder / run
    levels.mkdir()
    strategy = RayController(
        num_workers=4,
        worker_strategy=FSDP(tensor_parallel_size=2),
        accelerator="cpu",
        ray_options={**RAY_OPTIONS, "num_cpus": 5, "_system_config": AT_ONCE},
    )
    own = [RemotizeOnHeadOnly()] if not run.startswith("without") else []
    is_piling = run == "without, lax"
    watching = [Reads(), Levels(levels, is_piling), WorkerLevels(levels, is_piling)]
    trainer = bare_trainer(
        folder, num_steps + 1, GenerateInWorkers(RandomSampler), *own, *watching, strategy=strategy, logger=False
    )
    with pytest.MonkeyPatch.context() as patch:
        if run.endswith("lax"):
            patch.setattr(ray_controller, "WorkerGroup", LaxGroup)
        trainer.fit(module, make_data(folder))
    strategy.close()


def train_all(folder: Path) -> None:
    """Many steps under a controller with 2 x 2 workers; each process writes what it holds to ``RUN/NAME.levels``.

    The controller reads each step's batch, and eight megabytes besides.
    """
    for run, num_steps in RUNS.items():
        train(folder, run, num_steps)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("leaks")
    save_model(folder / "model", num_key_value_heads=2)
    finish([start_controller(train_all, folder)])
    return folder


def read(folder: Path, run: str, process: str) -> list[list[int]]:
    """By step: its number, entries and bytes at the end of the one before and after that, and resident bytes."""
    lines = (folder / run / f"{process}.levels").read_text().splitlines()
    rows = [[int(word) for word in line.split()] for line in lines]
    assert [row[0] for row in rows] == list(range(RUNS[run] + 1))
    return rows


@pytest.mark.parametrize("run", ["with, lax", "without"])
def test_nothing_is_left_of_a_step(folder: Path, run: str) -> None:
    for process in PROCESSES:
        rows = read(folder, run, process)
        assert [row[3:5] for row in rows] == [[0, 0]] * len(rows), process
        stores = process in HEADS or (process in OTHERS and run == "without")
        assert [row[1] for row in rows[1:]] == [int(stores)] * (len(rows) - 1), process


def test_resident_memory_is_flat(folder: Path) -> None:
    """A payload left behind in each step would be ten of them in the last 10 steps.

    Three are allowed: one may be under way at a look, the store may put one on pages that this process has not touched
    before, and allocators keep some.
    """
    for process in PROCESSES:
        resident = {row[0]: row[5] for row in read(folder, "with, lax", process) if row[0] % MEASURED_EVERY == 0}
        assert resident[20] - resident[10] < 3 * PAYLOAD_BYTES, (process, resident)


def test_unacknowledged_results_grow_without_callback(folder: Path) -> None:
    """Each step leaves its batch, as large as that of the head, and the payload."""
    run = "without, lax"
    for process in ("controller", *HEADS):
        assert all(row[3:5] == [0, 0] for row in read(folder, run, process)), process
    for head, other in zip(HEADS, OTHERS, strict=True):
        batch_bytes = 0
        for (step, _, of_batch, *_), row in zip(read(folder, run, head), read(folder, run, other), strict=True):
            batch_bytes += of_batch
            assert row[3:5] == [2 * step, batch_bytes + step * PAYLOAD_BYTES], (other, step)
