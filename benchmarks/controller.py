"""The same GRPO run by equal ranks (SPMD) and by a controller with as many Ray workers.

    python benchmarks/controller.py --gpus 2
    python benchmarks/controller.py --gpus 2 --at-once 2    # on four GPUs, so that both meet the same hour

Both shard the actor by FSDP and have an engine a GPU, the same prompts, seed and rewards. A step lasts from the end of
the one before to its own, as rank 0 or the controller sees it. The phases are those of rank 0 or worker 0; "rest" is
what they leave, and "between" the part of it in which no step is under way there: loggers and callbacks at a step's
end, in the controller also callbacks that are late and the way of the orders.

"sent" and "received" are pickled bytes a step: the arguments of the controller's calls to Ray, and the results and
stored objects that came into its process; "fetched" are those of the latter that its callbacks read of batches.
"controller on GPU" is what its process has there when training ends: by torch, and by nvidia-smi if that knows it.

Writes --out/table.md and table.csv, a line a way: medians of the steps after the warm-up, and how the run ended. With
`-- --rollout.seed 0`, which is slower, both sample the same, and their metrics differ by rounding alone.
"""

import argparse
import json
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from launch import (
    PHASES,
    Job,
    Run,
    benchmark_parser,
    callback,
    count_gpus,
    finish,
    fit,
    grpo_config,
    middle,
    parse,
    prepare,
)

SPMD, FSDP = "SPMD", "rlightning.parallel.FSDP"
REWARD = "controller.checksum_reward"
UNEQUAL = ("time/", "throughput/", "memory/")
"""Metrics that two runs of the same work need not share."""


def ray_strategy(worker_strategy: Any, arguments: argparse.Namespace, num_workers: int) -> dict[str, Any]:
    """A controller's strategy as YAML has it; on the CPU with as many workers as asked for, however few cores."""
    options = {"ray_options": {"num_cpus": num_workers}} if arguments.device == "cpu" else {}
    settings = {"worker_strategy": worker_strategy, **options}
    return {"class_path": "rlightning.controller.RayController", "init_args": settings}


def checksum_reward(completion: str) -> float:
    """In [0, 1), as good as random, and the same for the same text in every run."""
    return zlib.crc32(completion.encode()) / 2**32


def summarise(run: Run, warm_up: int, spmd_seconds: float | None) -> dict[str, Any]:
    """One line, of whatever steps there are after the warm-up.

    Args:
        run: of either way.
        warm_up: steps left out.
        spmd_seconds: of a step of the other way; None: this is it, or it has none.
    """
    trace, steps = run.read_trace("steps")[warm_up:], run.metrics()[warm_up:]
    seconds = [float(row["seconds"]) for row in trace]
    both = list(zip(seconds, steps, strict=False))  # a run that was killed has not written its last metrics
    step, is_spmd = middle(seconds), run.job.name == SPMD
    tokens = middle(row["throughput/tokens_per_second"] * row["time/step"] for row in steps)
    traffic = {name: middle(float(row[name]) / 1000 for row in trace) for name in ("sent", "received", "fetched")}
    return {
        "way": run.job.name,
        "GPUs": run.job.num_devices,
        "step, s": step,
        "min": min(seconds, default=None),
        "max": max(seconds, default=None),
        **{f"{phase}, s": middle(row.get(f"time/{phase}", 0.0) for row in steps) for phase in PHASES},
        "rest, s": middle(whole - sum(row.get(f"time/{phase}", 0.0) for phase in PHASES) for whole, row in both),
        "between, s": middle(whole - row["time/step"] for whole, row in both),
        "tokens a step": None if tokens is None else round(tokens),
        "tokens/s": tokens / step if tokens and step else None,
        "x SPMD": 1.0 if is_spmd and step else step / spmd_seconds if step and spmd_seconds else None,
        **{f"{name}, kB": None if is_spmd else value for name, value in traffic.items()},
        "controller on GPU": None if is_spmd else describe_device(run),
        "steps": len(trace),
        "end": run.end,
    }


def describe_device(run: Run) -> str | None:
    """What the controller's process had on GPUs when training ended; None if it did not come so far."""
    path = run.folder / "device.json"
    if not path.is_file():
        return None
    found = json.loads(path.read_text())
    memory = "" if found["mib"] is None else f", {found['mib']:g} MiB"
    return f"{'a' if found['is_initialized'] else 'no'} context{memory}"


def compare(spmd: Run, controller: Run, warm_up: int) -> list[str]:
    """Notes: what of "rest" is in the controller, and how far the metrics of both ways are apart."""
    notes = []
    outside = middle(float(row["seconds"]) - float(row["inside"]) for row in controller.read_trace("steps")[warm_up:])
    if outside is not None:
        notes.append(f"Of the controller's step {outside:.3g} s are outside its order to train (in the median).")
    pairs = list(enumerate(zip(spmd.metrics(), controller.metrics(), strict=False), start=1))
    for step, (one, other) in pairs[:1] + pairs[1:][-1:]:
        common = [name for name in one if name in other and not name.startswith(UNEQUAL)]
        apart, name = max((abs(one[name] - other[name]), name) for name in common)
        notes.append(
            f"Step {step}: {len(common)} common metrics differ by {apart:.2g} at most ({name}, {one[name]:.6g})."
        )
    return notes


def main() -> None:
    """Run both ways, whatever becomes of either, and compare."""
    usual: dict[str, Any] = {"warm_up": 2, "samples": 8, "max_new_tokens": 512, "microbatch_tokens": 32768}
    parser = benchmark_parser(__doc__ or "", "controller", steps=7, utilization=0.3, **usual)
    parser.add_argument("--gpus", type=int, default=2, help="ranks, and workers (2)")
    parser.add_argument("--prompts", type=int, default=32, help="a step and GPU (32)")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds of all, shared evenly between turns (570)")
    arguments = parse(parser)
    deadline = time.monotonic() + arguments.limit
    strategies = {SPMD: {"class_path": FSDP}, "controller": ray_strategy(FSDP, arguments, arguments.gpus)}
    needed = arguments.gpus * min(arguments.at_once, len(strategies))
    if arguments.device == "cuda" and (has := count_gpus()) < needed:
        parser.error(f"--gpus {arguments.gpus} --at-once {arguments.at_once} needs {needed} GPUs, and there are {has}")
    prepare(arguments)
    config = grpo_config(
        arguments,
        prompts_per_step=arguments.prompts * arguments.gpus,
        samples_per_prompt=arguments.samples,
        num_devices=arguments.gpus,
        model={"max_tokens_per_microbatch": arguments.microbatch_tokens, "kl_coef": 0.0, "rewards": [REWARD]},
        rollout={
            "max_new_tokens": arguments.max_new_tokens,
            "gpu_memory_utilization": arguments.utilization,
            "verify_every": 1000,
        },
        callbacks=[callback("ray_traffic.StepTrace")],
    )

    def run(number: int, way: str) -> Run:
        job = Job(way, config | {"trainer": config["trainer"] | {"strategy": strategies[way]}}, arguments.gpus)
        turns = 1 if arguments.at_once > 1 else len(strategies) - number
        first = number * arguments.gpus if arguments.at_once > 1 else 0
        timeout = (deadline - time.monotonic()) / turns
        return fit(job, arguments, range(first, first + arguments.gpus), timeout=timeout)

    with ThreadPoolExecutor(arguments.at_once) as pool:
        runs = list(pool.map(run, range(len(strategies)), strategies))
    rows = [summarise(runs[0], arguments.warm_up, None)]
    rows.append(summarise(runs[1], arguments.warm_up, rows[0]["step, s"]))
    finish(arguments, rows, compare(runs[0], runs[1], arguments.warm_up))


if __name__ == "__main__":
    main()
