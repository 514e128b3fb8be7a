"""Trainer and engines on different GPUs, at several staleness, against the colocated run on the same GPUs.

    python benchmarks/asynchronous.py --gpus 2 4
    python benchmarks/asynchronous.py --gpus 4 --staleness 0 2 --cache recompute
    python benchmarks/asynchronous.py --prompts 16 32 64 --staleness 2

Half of the GPUs train and half generate, --engines on each; the colocated run trains and generates on all in turn, also
with so many engines on each.
The same prompts, random rewards, no reference model. Completions end at random, after a third of --max-new-tokens in
the mean, so that ranks and steps wait for the longest ones unless something else is to be done: the fewer prompts a
step has, the larger is the share of its time in which colocated engines work on a few long ones.

Writes --out/table.md and table.csv, a line a run: medians of the steps after the warm-up. "x colocated" is tokens
trained a second over those of the colocated run on as many GPUs; "trainer waits" and "engines idle" are shares of the
time; "swap" is how long generation stands still for new weights; "expired" are prompts that grew too old, a step.
"free" is what an engine's GPU had left for it when it started, beside an actor or without, "cache" what it took for its
KV cache, both in GiB, of one engine and by vLLM's own words.
"""

import re
from itertools import product
from statistics import mean, median
from typing import Any

from launch import Job, Run, benchmark_parser, finish, format_table, grpo_config, parse, prepare, run_jobs, say
from weak_scaling import rare_tokens

COLOCATED = "colocated"
ENGINE_MEMORY = re.compile(r"Initial free memory (?P<free>[\d.]+) GiB, reserved (?P<cache>[\d.]+) GiB")


def summarise(run: Run, warm_up: int, colocated: dict[tuple[int, int], float]) -> dict[str, Any]:
    """One line.

    Args:
        run: of any placement.
        warm_up: steps left out.
        colocated: tokens/s of the colocated runs, by GPUs and prompts a step; it is added to.
    """
    steps = run.metrics()[warm_up:]
    num_gpus, prompts = run.job.num_devices, run.job.config["model"]["init_args"]["prompts_per_step"]
    placement = run.job.name.partition("_prompts_")[2]
    seconds = sum(row["time/step"] for row in steps)
    rate = sum(row["throughput/tokens_per_second"] * row["time/step"] for row in steps) / seconds
    if placement == COLOCATED:
        colocated[num_gpus, prompts] = rate
    compared = colocated.get((num_gpus, prompts))
    memory = ENGINE_MEMORY.search(run.read_log())
    swaps = [1000 * row["async/swap_pause"] for row in steps if "async/swap_pause" in row]
    return {
        "GPUs": num_gpus,
        "prompts": prompts,
        "run": placement.replace("_", " "),
        "step, s": median(row["time/step"] for row in steps),
        "tokens/s": rate,
        "x colocated": None if compared is None else rate / compared,
        "trainer waits": sum(row.get("async/trainer_waited", 0.0) for row in steps) / seconds,
        "engines idle": sum(row.get("async/engines_idle", 0.0) for row in steps) / seconds,
        "age": mean(row.get("async/age_mean", 0.0) for row in steps),
        "expired": mean(row.get("async/expired", 0.0) for row in steps),
        "swap, ms": median(swaps) if swaps else None,
        "longest swap": max(swaps, default=None),
        "free, GiB": memory and float(memory["free"]),
        "cache, GiB": memory and float(memory["cache"]),
        "steps": len(steps),
    }


def main() -> None:
    """Run each placement on each number of GPUs, one after the other, and compare."""
    usual: dict[str, Any] = {"warm_up": 4, "prompts": [64], "samples": 8}
    usual |= {"max_new_tokens": 1024, "microbatch_tokens": 16384}
    parser = benchmark_parser(__doc__ or "", "asynchronous", steps=12, **usual)
    parser.add_argument("--gpus", type=int, nargs="+", default=[2], help="numbers of GPUs (2)")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4], help="of the runs (0 1 2 4)")
    parser.add_argument("--cache", choices=["keep", "recompute"], default="keep", help="cache_after_sync (keep)")
    parser.add_argument("--engines", type=int, default=1, help="on each GPU that has any (1)")
    arguments = parse(parser)
    if any(number < 2 or number % 2 for number in arguments.gpus):
        parser.error(f"--gpus {arguments.gpus}: half of them train, so each number must be even")
    prepare(arguments)
    rollout: dict[str, Any] = {
        "max_new_tokens": arguments.max_new_tokens,
        "verify_every": 1000,
        "stop_token_ids": rare_tokens(arguments.model, arguments.max_new_tokens // 3),
    }
    jobs = []
    for num_gpus, prompts in product(arguments.gpus, arguments.prompts):
        num_engines = num_gpus // 2 * arguments.engines
        elsewhere = {"placement": "standalone", "num_engines": num_engines, "cache_after_sync": arguments.cache}
        placements = {COLOCATED: (num_gpus, rollout | {"num_engines": arguments.engines})} | {
            f"standalone_{k}": (num_gpus // 2, rollout | elsewhere | {"max_staleness": k}) for k in arguments.staleness
        }
        for name, (num_ranks, section) in placements.items():
            config = grpo_config(
                arguments,
                prompts_per_step=prompts,
                samples_per_prompt=arguments.samples,
                num_devices=num_ranks,
                model={"max_tokens_per_microbatch": arguments.microbatch_tokens, "kl_coef": 0.0},
                rollout=section,
            )
            jobs.append(Job(f"{num_gpus}_gpus_{prompts}_prompts_{name}", config, num_gpus))
    colocated: dict[tuple[int, int], float] = {}
    rows: list[dict[str, Any]] = []
    for run in run_jobs(jobs, arguments):
        rows.append(summarise(run.require_success(), arguments.warm_up, colocated))
        say(format_table(rows).splitlines()[-1])  # should the rest take too long
    finish(arguments, rows)


if __name__ == "__main__":
    main()
