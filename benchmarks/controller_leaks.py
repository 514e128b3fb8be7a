"""Does a controller with four workers leave anything behind in 200 steps?

    python benchmarks/controller_leaks.py
    python benchmarks/controller_leaks.py --device cpu

GRPO on random completions of one length, so that steps differ in nothing, without an engine, by workers in
tensor-parallel groups of two, of which only the first stores what both have (RemotizeOnHeadOnly). The controller reads
each step's batch.

Writes --out/table.md and table.csv, a line a process and quantity that is not always 0: its means at the end of the
first and of the last 20 steps after the warm-up, and its slope over all of these, a step (least squares). "stored" are
tensors that the process has put into Ray's object store and that are still referred to; "object store" is what is used
of it by all; "host" is memory that the process shares with no other, what its allocator keeps for later left out;
"device" is what torch has allocated.
"""

import ctypes
import gc
import os
from pathlib import Path
from statistics import linear_regression, mean
from typing import Any

import torch
from controller import ray_strategy
from launch import Job, Rows, benchmark_parser, callback, finish, fit, grpo_config, parse, prepare
from probes import CSVTrace
from ray_traffic import object_store_bytes
from synthetic import SyntheticRollout

from rlightning.controller.tensor_store import live_bytes, live_entries

WORKERS = 4
WINDOW = 20
"""Steps of a mean."""
COLUMNS = ["stored", "stored, kB", "open files", "host, kB", "device, kB"]
OBJECT_STORE = "object store, kB"


def private_kilobytes() -> float:
    """Memory of this process that no other shares, after garbage collection and with free heap pages given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return float(status["RssAnon"].split()[0]) * 1.024  # KiB


class WorkerLevels(CSVTrace):
    """Writes what this worker holds at the end of each step."""

    runs_in = "workers"

    def __init__(self, name: str = "worker", columns: list[str] = COLUMNS) -> None:
        super().__init__(name, columns)

    def levels(self) -> list[float]:
        """The present values."""
        device = torch.cuda.memory_allocated() / 1000 if torch.cuda.is_initialized() else 0
        files = len(os.listdir("/proc/self/fd"))
        return [live_entries(), live_bytes() / 1000, files, private_kilobytes(), device]

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write them."""
        self.write(trainer, *self.levels())


class ControllerLevels(WorkerLevels):
    """The same of the controller, which reads each batch, and of Ray's object store."""

    runs_in = "controller"

    def __init__(self) -> None:
        super().__init__("controller", [*COLUMNS, OBJECT_STORE])

    def on_update_end(self, trainer: Any, module: Any, batch: Any) -> None:
        """Fetch what the workers have stored."""
        assert len(batch.token_ids) == batch.num_tokens

    def levels(self) -> list[float]:
        """The present values."""
        return [*super().levels(), object_store_bytes() / 1000]


class WorkerRollout(SyntheticRollout):
    """Random completions where the actor is."""

    runs_in = "workers"


def summarise(process: str, trace: list[dict[str, str]]) -> Rows:
    """A line for each quantity of a process."""
    rows = []
    for name in list(trace[0])[1:] if trace else ():
        values = [float(row[name]) for row in trace]
        if any(values):
            slope = linear_regression(range(len(values)), values).slope if len(values) > 1 else None
            first, last = mean(values[:WINDOW]), mean(values[-WINDOW:])
            rows.append({"process": process, "of it": name, "first": first, "last": last, "a step": slope})
    return rows


def main() -> None:
    """Train, and compare the first steps with the last."""
    usual: dict[str, Any] = {"warm_up": 30, "samples": 4, "max_new_tokens": 32, "microbatch_tokens": 4096}
    parser = benchmark_parser(__doc__ or "", "controller_leaks", steps=230, model="tiny", limit=570.0, **usual)
    parser.add_argument("--prompts", type=int, default=4, help="a step (4)")
    arguments = parse(parser)
    prepare(arguments)
    config = grpo_config(
        arguments,
        prompts_per_step=arguments.prompts,
        samples_per_prompt=arguments.samples,
        num_devices=WORKERS,
        model={
            "max_tokens_per_microbatch": arguments.microbatch_tokens,
            "kl_coef": 0.0,
            "validate_first": False,
            "compile": False,
        },
        callbacks=[
            callback("controller_leaks.WorkerRollout", max_new_tokens=arguments.max_new_tokens),
            callback("RemotizeOnHeadOnly"),
            callback("controller_leaks.WorkerLevels"),
            callback("controller_leaks.ControllerLevels"),
        ],
    )
    fsdp = {"class_path": "rlightning.parallel.FSDP", "init_args": {"tensor_parallel_size": 2}}
    config["trainer"] |= {"strategy": ray_strategy(fsdp, arguments, WORKERS), "enable_progress_bar": False}
    job = Job("run", config | {"rollout": None}, WORKERS)
    run = fit(job, arguments, range(WORKERS), timeout=arguments.limit)
    traces = {"controller": run.read_trace("controller")}
    traces |= {f"worker {rank}": run.read_trace("worker", rank) for rank in range(WORKERS)}
    rows = [row for process, trace in traces.items() for row in summarise(process, trace[arguments.warm_up :])]
    steps = len(traces["controller"])
    finish(arguments, rows, [f"{steps} steps, {run.seconds:.0f} s, {run.end}"])


if __name__ == "__main__":
    main()
