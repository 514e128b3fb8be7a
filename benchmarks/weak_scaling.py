"""The same work a GPU on 1, 2 and 4 GPUs: seconds by phase, tokens/s a GPU, and efficiency against one GPU.

    python benchmarks/weak_scaling.py --gpus 1 2 4
    python benchmarks/weak_scaling.py --gpus 1 2 --fsdp '{"reduce_every_microbatch": false}'

Each rank has an engine and the same number of prompts; the actor is sharded by FSDP over more than one GPU. All
completions have the same length, so that every GPU has the same work. With --vary they end at random: then ranks wait
for each other's longest completion, and tokens have to be balanced for the update.

Writes --out/table.md and table.csv, a line a number of GPUs: medians of the steps after the warm-up.
"""

import json
from pathlib import Path
from statistics import median, stdev
from typing import Any

from launch import PHASES, Job, Run, benchmark_parser, finish, format_table, grpo_config, parse, prepare, run_jobs, say


def rare_tokens(model: str, mean_length: int) -> list[int]:
    """So many tokens that a model of random weights samples one of them after ``mean_length`` in the mean."""
    vocabulary: int = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    return list(range(vocabulary - max(vocabulary // mean_length, 1), vocabulary))


def summarise(run: Run, warm_up: int, baseline: float | None) -> dict[str, Any]:
    """One line: medians over the steps after the warm-up.

    Args:
        run: on any number of GPUs.
        warm_up: steps left out.
        baseline: tokens/s of one GPU; None: this run's.
    """
    steps = run.metrics()[warm_up:]
    num_gpus = run.job.num_devices
    rate = median(row["throughput/tokens_per_second"] for row in steps) / num_gpus
    phases = {f"{phase}, s": median(row.get(f"time/{phase}", 0.0) for row in steps) for phase in PHASES}
    seconds = [row["time/step"] for row in steps]
    generations = [row["time/generate"] for row in steps]
    return {
        "GPUs": num_gpus,
        "step, s": median(seconds),
        "min": min(seconds),
        "max": max(seconds),
        **phases,
        "generate's deviation": stdev(generations) if len(steps) > 1 else 0.0,
        "rest, s": median(row["time/step"] - sum(row.get(f"time/{phase}", 0.0) for phase in PHASES) for row in steps),
        "tokens/s a GPU": rate,
        "efficiency": rate / (baseline or rate),
        "peak, GiB": max((row.get("memory/peak_gib", 0.0) for row in steps), default=0.0),
        "steps": len(steps),
    }


def main() -> None:
    """Run each size and compare."""
    usual: dict[str, Any] = {"warm_up": 2, "samples": 8, "max_new_tokens": 512, "microbatch_tokens": 16384}
    parser = benchmark_parser(__doc__ or "", "weak_scaling", steps=7, utilization=0.3, **usual)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4], help="sizes, the baseline first (1 2 4)")
    parser.add_argument("--fsdp", type=json.loads, default={}, metavar="JSON", help="arguments of FSDP ({})")
    parser.add_argument("--prompts", type=int, default=32, help="a step and GPU (32)")
    parser.add_argument(
        "--vary", action="store_true", help="let completions end at random, after a third of it in the mean"
    )
    arguments = parse(parser)
    prepare(arguments)
    rollout: dict[str, Any] = {
        "max_new_tokens": arguments.max_new_tokens,
        "gpu_memory_utilization": arguments.utilization,
        "verify_every": 1000,
    }
    if arguments.vary:
        rollout["stop_token_ids"] = rare_tokens(arguments.model, arguments.max_new_tokens // 3)
    jobs = []
    for num_gpus in arguments.gpus:
        config = grpo_config(
            arguments,
            prompts_per_step=arguments.prompts * num_gpus,
            samples_per_prompt=arguments.samples,
            num_devices=num_gpus,
            model={"max_tokens_per_microbatch": arguments.microbatch_tokens},
            rollout=rollout,
        )
        if num_gpus > 1:
            config["trainer"]["strategy"]["init_args"] = arguments.fsdp
        jobs.append(Job(f"{num_gpus}_gpus", config, num_gpus))
    rows: list[dict[str, Any]] = []
    for run in run_jobs(jobs, arguments):
        baseline = rows[0]["tokens/s a GPU"] if rows else None
        rows.append(summarise(run.require_success(), arguments.warm_up, baseline))
        say(format_table(rows).splitlines()[-1])  # should the rest take too long
    finish(arguments, rows)


if __name__ == "__main__":
    main()
