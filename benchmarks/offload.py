"""What OffloadDuringRollout moves, how fast, and the device memory that the engine finds free.

    python benchmarks/offload.py --model 1.7b

Three runs of the same steps: without the callback, with optimizer state and gradients offloaded, and with the
parameters too. EmptyCacheAfterUpdate is in all three, so that what differs is what was offloaded.

Writes --out/table.md and table.csv: medians over the steps after the first.
"""

import argparse
from typing import Any

from launch import GIB, Job, Run, benchmark_parser, callback, finish, grpo_config, middle, prepare, run_jobs

ARMS: dict[str, dict[str, Any] | None] = {
    "nothing": None,
    "optimizer": {"parameters": False},
    "optimizer_and_parameters": {"parameters": True},
}
"""Arguments of OffloadDuringRollout."""


def make_job(arguments: argparse.Namespace, arm: str) -> Job:
    """One arm."""
    callbacks = [callback("EmptyCacheAfterUpdate")]
    if (options := ARMS[arm]) is not None:
        callbacks.append(callback("OffloadDuringRollout", **options))
    config = grpo_config(
        arguments,
        prompts_per_step=4 * arguments.gpus,
        samples_per_prompt=4,
        num_devices=arguments.gpus,
        rollout={
            "max_new_tokens": 64,
            "gpu_memory_utilization": arguments.utilization,
            "engine": {"enforce_eager": True},
        },
        callbacks=[*callbacks, callback("probes.MemoryTrace")],
    )
    return Job(arm, config, arguments.gpus)


def column(steps: list[dict[str, float]], name: str) -> list[float]:
    """A metric's values in the steps that have it."""
    return [row[name] for row in steps if name in row]


def summarise(run: Run) -> dict[str, Any]:
    """One arm's line; memory at the moment the engine begins to generate, rank 0."""
    steps = run.metrics()[1:]
    trace = [row for row in run.read_trace("memory") if row["moment"] == "sync_end" and int(row["step"]) > 1]
    moved = middle(column(steps, "memory/offloaded_gib"))
    row: dict[str, Any] = {"offloaded": run.job.name, "GiB": moved}
    for way, name in (("out", "time/offload"), ("back", "time/restore")):
        seconds = middle(column(steps, name))
        row[f"{way}, s"] = seconds
        row[f"{way}, GB/s"] = moved * GIB / 1e9 / seconds if moved and seconds else None
    for what in ("allocated", "reserved", "free"):
        row[f"{what} while generating, GiB"] = middle([int(entry[what]) / GIB for entry in trace])
    row["step, s"] = middle([row["time/step"] for row in steps])
    return row


def main() -> None:
    """Run the arms."""
    parser = benchmark_parser(__doc__ or "", "offload", model="1.7b", steps=5, utilization=0.3)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="which runs (all)")
    parser.add_argument("--gpus", type=int, default=1, help="ranks; the actor is sharded over more than one (1)")
    arguments = parser.parse_args()
    prepare(arguments)
    runs = run_jobs([make_job(arguments, arm) for arm in arguments.arms], arguments)
    finish(arguments, [summarise(run.require_success()) for run in runs])


if __name__ == "__main__":
    main()
