"""Seconds and GB/s of sending the actor's weights to the rollout engines, from FSDP shards on several GPUs.

    python benchmarks/weight_sync.py --gpus 2 4

For each number of GPUs two runs: one engine a rank, and one tensor-parallel engine over all of them. The steps between
the syncs are as small as can be. Every second sync is verified (the canary is scored by actor and engine), and is
counted by itself. GB/s is the model's bytes in the rollout's dtype, once, over the seconds of the whole sync: what each
engine receives. Engines do not sleep unless --sleep says so; then "weights alone" ends when they have the weights, and
the rest is taking the memory of the KV cache.

Writes --out/table.md and table.csv, a line a run and kind of sync, and syncs.csv, a line a sync: the slowest rank's
clock, the device synchronised before and after.
"""

import argparse
import json
import math
import struct
from pathlib import Path
from statistics import median
from typing import Any

from launch import Job, Rows, Run, benchmark_parser, callback, finish, grpo_config, prepare, run_jobs, write_csv

VERIFY_EVERY = 2
ROLLOUT_BYTES = {"cuda": 2, "cpu": 4}
"""Bytes of a parameter in the rollout's usual dtype."""


def count_parameters(model: Path) -> int:
    """Of a Hugging Face folder, read from the heads of its safetensors files, where tied weights are once."""
    count = 0
    for path in model.glob("*.safetensors"):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            head = json.loads(file.read(size))
        count += sum(math.prod(tensor["shape"]) for name, tensor in head.items() if name != "__metadata__")
    return count


def make_job(arguments: argparse.Namespace, num_gpus: int, is_tensor_parallel: bool) -> Job:
    """One run."""
    rollout: dict[str, Any] = {
        "max_new_tokens": 8,
        "gpu_memory_utilization": arguments.utilization,
        "sleep": arguments.sleep,
        "verify_every": VERIFY_EVERY,
        "engine": {"enforce_eager": True, "max_num_seqs": 16},
    }
    if is_tensor_parallel:
        rollout["engine"]["tensor_parallel_size"] = num_gpus
    config = grpo_config(
        arguments,
        prompts_per_step=num_gpus,
        samples_per_prompt=2,
        num_devices=num_gpus,
        rollout=rollout,
        callbacks=[callback("probes.SyncTrace", verify_every=VERIFY_EVERY)],
    )
    return Job(f"{num_gpus}_gpus_{'one_engine' if is_tensor_parallel else 'engine_a_rank'}", config, num_gpus)


def read_syncs(run: Run) -> Rows:
    """A row a sync: the seconds of the slowest rank, and whether it was verified."""
    ranks = [run.read_trace("sync", rank) for rank in range(run.job.num_devices)]
    rows = []
    for entries in zip(*ranks, strict=True):
        until_wake = [float(entry["seconds_until_wake"]) for entry in entries if entry["seconds_until_wake"]]
        rows.append(
            {
                "run": run.job.name,
                "step": int(entries[0]["step"]),
                "is_verified": entries[0]["is_verified"] == "1",
                "seconds": max(float(entry["seconds"]) for entry in entries),
                "seconds_until_wake": max(until_wake, default=None),
            }
        )
    return rows


def summarise(run: Run, syncs: Rows, num_bytes: int, warm_up: int) -> Rows:
    """A line for verified syncs and one for others; the first ones, which wait for the engine, left out."""
    rows: Rows = []
    for is_verified in (False, True):
        counted = [sync for sync in syncs[warm_up:] if sync["is_verified"] == is_verified]
        chosen = [sync["seconds"] for sync in counted]
        until_wake = [sync["seconds_until_wake"] for sync in counted if sync["seconds_until_wake"] is not None]
        if chosen:
            rows.append(
                {
                    "GPUs": run.job.num_devices,
                    "engines": "one, TP" if run.job.name.endswith("one_engine") else "one a rank",
                    "verified": "yes" if is_verified else "no",
                    "syncs": len(chosen),
                    "median, ms": 1000 * median(chosen),
                    "min, ms": 1000 * min(chosen),
                    "max, ms": 1000 * max(chosen),
                    "weights alone, median, ms": 1000 * median(until_wake) if until_wake else None,
                    "GB": num_bytes / 1e9,
                    "GB/s": num_bytes / 1e9 / median(chosen),
                }
            )
    return rows


def main() -> None:
    """Run each combination."""
    parser = benchmark_parser(__doc__ or "", "weight_sync", steps=14, warm_up=2, utilization=0.2)
    parser.add_argument("--gpus", type=int, nargs="+", default=[2, 4], help="numbers of GPUs (2 4)")
    parser.add_argument(
        "--sleep", action="store_true", help="engines sleep between rollouts: with the seconds of waking"
    )
    parser.add_argument("--engines", choices=["a_rank", "one", "both"], default="both", help="which kinds (both)")
    arguments = parser.parse_args()
    prepare(arguments)
    num_bytes = count_parameters(Path(arguments.model)) * ROLLOUT_BYTES[arguments.device]
    kinds = {"a_rank": [False], "one": [True], "both": [False, True]}[arguments.engines]
    # On one GPU the two kinds are the same.
    jobs = [
        make_job(arguments, n, kind) for n in arguments.gpus for kind in kinds if n > 1 or not kind or len(kinds) == 1
    ]
    runs = [run.require_success() for run in run_jobs(jobs, arguments)]
    syncs = {run.job.name: read_syncs(run) for run in runs}
    write_csv(arguments.out / "syncs.csv", [row for rows in syncs.values() for row in rows])
    table = [row for run in runs for row in summarise(run, syncs[run.job.name], num_bytes, arguments.warm_up)]
    finish(arguments, table)


if __name__ == "__main__":
    main()
