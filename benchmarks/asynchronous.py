"""Trainer and engines on different GPUs, at several staleness, against colocated runs on the same GPUs.

    python benchmarks/asynchronous.py --splits 1+1 2+2
    python benchmarks/asynchronous.py --splits 2+2 1+3 --tensor-parallel 1 2 4 --staleness 0 1 4 --limit 560
    python benchmarks/asynchronous.py --prompts 16 32 64 --staleness 2 --cache recompute

A split of 1+3 trains on one GPU and generates on three, --engines on each; a colocated run trains and generates on all
in turn, with as many engines, each of them over --tensor-parallel GPUs. The same prompts, random rewards, no reference
model. Completions end at random, after a third of --max-new-tokens in the mean, so that ranks and steps wait for the
longest ones unless something else is to be done: the fewer prompts a step has, the larger is the share of its time in
which colocated engines work on a few long ones.

A split is one run in which the bound on staleness rises, so that engines start once, with room for the largest bound.
Each bound has --steps steps, and as many more as the bound is, until tokens are that old; neither these nor --warm-up
steps count. On a bare machine a run takes three minutes, two of them for the start of its engines.

Writes --out/table.md and table.csv, a line a placement and bound: the median of the steps' seconds, and all tokens over
all seconds. "x colocated" is tokens trained a second over those of the colocated run with the smallest engines on as
many GPUs; "trainer waits" and "engines idle" are shares of the time, of colocated engines that outside of rollouts;
"sync" is the median of weight syncs, "swap" how long generation stands still for one; "requeued" are prompts that grew
too stale, a step. "free" is what an engine's GPU had left for it when it started, beside an actor or without, "cache"
what it took for its KV cache, both in GiB, of one engine and by vLLM's own words. A run that fails or is stopped by
--limit has lines too, of the steps that it came to. Lines are kept in --out: a later call adds what is missing.
"""

import argparse
import re
import time
from itertools import product
from statistics import mean
from typing import Any, NamedTuple

from launch import (
    Job,
    KeptRows,
    Rows,
    Run,
    benchmark_parser,
    callback,
    finish,
    format_table,
    grpo_config,
    middle,
    parse,
    prepare,
    run_jobs,
    say,
)
from weak_scaling import rare_tokens

COLOCATED = "colocated"
KEYS = ("GPUs", "prompts", "run", "tensor parallel", "staleness")
ENGINE_MEMORY = re.compile(r"Initial free memory (?P<free>[\d.]+) GiB, reserved (?P<cache>[\d.]+) GiB")


class Placement(NamedTuple):
    """Numbers of GPUs: that train, that only generate (none: colocated), and of each engine."""

    trainers: int
    engines: int = 0
    tensor_parallel: int = 1

    @property
    def name(self) -> str:
        """The split as the command line has it, or "colocated"."""
        return f"{self.trainers}+{self.engines}" if self.engines else COLOCATED


class Phase(NamedTuple):
    """The steps from ``start`` to ``end`` of a run, under one bound on staleness; those from ``counted`` on count."""

    staleness: int
    start: int
    counted: int
    end: int


def split(text: str) -> Placement:
    """Parse a split such as ``1+3``."""
    numbers = [int(part) for part in text.split("+") if part.isdecimal() and int(part)]
    if len(numbers) != 2 or len(text.split("+")) != 2:
        raise argparse.ArgumentTypeError(f"{text} is not a number of trainers + a number of engines, such as 1+3")
    return Placement(*numbers)


def placements(arguments: argparse.Namespace) -> list[Placement]:
    """All placements, for each number of GPUs first the one that the others are compared with."""
    found = []
    for num_gpus in dict.fromkeys(one.trainers + one.engines for one in arguments.splits):
        sizes = [size for size in sorted(arguments.tensor_parallel) if num_gpus % size == 0]
        colocated = [Placement(num_gpus, tensor_parallel=size) for size in sizes]
        splits = [one for one in arguments.splits if one.trainers + one.engines == num_gpus]
        found += [*colocated[:1], *splits, *colocated[1:]]
    return found


def phases(arguments: argparse.Namespace, placement: Placement) -> list[Phase]:
    """The phases of a run: a colocated one has a single one, on-policy."""
    found: list[Phase] = []
    for bound in sorted(set(arguments.staleness)) if placement.engines else [0]:
        start = found[-1].end if found else 0
        found.append(Phase(bound, start, start + arguments.warm_up + bound, start + arguments.steps + bound))
    return found


def make_job(arguments: argparse.Namespace, placement: Placement, prompts: int) -> Job:
    """One run of all its phases."""
    steps = phases(arguments, placement)
    rollout: dict[str, Any] = {
        "max_new_tokens": arguments.max_new_tokens,
        "verify_every": 1000,
        "stop_token_ids": rare_tokens(arguments.model, arguments.max_new_tokens // 3),
        "num_engines": arguments.engines * max(placement.engines, 1),
        "engine": {"tensor_parallel_size": placement.tensor_parallel},
    }
    callbacks = []
    if placement.engines:
        rollout |= {
            "placement": "standalone",
            "cache_after_sync": arguments.cache,
            "max_staleness": steps[-1].staleness,
        }
        callbacks.append(callback("probes.RaiseStaleness", bounds={phase.start: phase.staleness for phase in steps}))
    config = grpo_config(
        arguments,
        prompts_per_step=prompts,
        samples_per_prompt=arguments.samples,
        num_devices=placement.trainers,
        model={"max_tokens_per_microbatch": arguments.microbatch_tokens, "kl_coef": 0.0},
        rollout=rollout,
        callbacks=callbacks,
    )
    config["trainer"]["max_steps"] = steps[-1].end
    name = f"{prompts}_prompts_{placement.name}_{placement.tensor_parallel}"
    num_gpus = placement.trainers + placement.engines
    return Job(f"{num_gpus}_gpus_{name}", config, num_gpus)


def identify(prompts: int, placement: Placement, phase: Phase) -> dict[str, Any]:
    """The columns of a line that tell it from others."""
    trainers, engines, tensor_parallel = placement
    values = (trainers + engines, prompts, placement.name, tensor_parallel, phase.staleness)
    return dict(zip(KEYS, values, strict=True))


def is_missing(line: dict[str, Any], rows: Rows) -> bool:
    """Whether no run that ended well has given a line."""
    return not any(line.items() <= row.items() and row["end"] == "ok" for row in rows)


def summarise(run: Run, placement: Placement, prompts: int, phase: Phase) -> dict[str, Any]:
    """One line, of whatever steps there are.

    Args:
        run: of the placement.
        placement: where it trains and generates.
        prompts: a step.
        phase: of the run.
    """
    steps = run.metrics()[phase.counted : phase.end]
    seconds = sum(row["time/step"] for row in steps)
    rate = sum(row["throughput/tokens_per_second"] * row["time/step"] for row in steps) / seconds if steps else None
    # On-policy, one side of a split works while the other does not.
    waits = [row.get("async/trainer_waited", row["time/generate"] if placement.engines else 0.0) for row in steps]
    idle = [row.get("async/engines_idle", row["time/step"] - row["time/generate"]) for row in steps]
    swaps = [1000 * row["async/swap_pause"] for row in steps if "async/swap_pause" in row]
    memory = ENGINE_MEMORY.search(run.read_log())
    return {
        **identify(prompts, placement, phase),
        "step, s": middle(row["time/step"] for row in steps),
        "tokens/s": rate,
        "trainer waits": sum(waits) / seconds if steps else None,
        "engines idle": sum(idle) / seconds if steps else None,
        "sync, s": middle(row.get("time/sync", 0.0) for row in steps),
        "swap, ms": middle(swaps),
        "longest swap": max(swaps, default=None),
        "mean staleness": mean(row.get("async/staleness_mean", 0.0) for row in steps) if steps else None,
        "requeued": mean(row.get("async/requeued", 0.0) for row in steps) if steps else None,
        "free, GiB": memory and float(memory["free"]),
        "cache, GiB": memory and float(memory["cache"]),
        "steps": len(steps),
        "end": run.end,
    }


def compare(row: dict[str, Any], rows: Rows) -> float | None:
    """Tokens a second over those of the colocated run with the smallest engines; None without one."""
    work = {"GPUs": row["GPUs"], "prompts": row["prompts"], "run": COLOCATED}
    colocated = [other for other in rows if work.items() <= other.items() and other["tokens/s"]]
    if not colocated or not row["tokens/s"]:
        return None
    return float(row["tokens/s"] / min(colocated, key=lambda other: other["tensor parallel"])["tokens/s"])


def main() -> None:
    """Run each placement, one after the other, and compare."""
    usual: dict[str, Any] = {"warm_up": 2, "prompts": [32], "samples": 8, "limit": 3600.0}
    usual |= {"max_new_tokens": 1024, "microbatch_tokens": 16384}
    parser = benchmark_parser(__doc__ or "", "asynchronous", steps=6, **usual)
    parser.add_argument(
        "--splits", type=split, nargs="+", default=[split("1+1")], help="GPUs, trainers + engines (1+1)"
    )
    parser.add_argument("--tensor-parallel", type=int, nargs="*", default=[1], help="GPUs of a colocated engine (1)")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4], help="of the splits (0 1 2 4)")
    parser.add_argument("--cache", choices=["keep", "recompute"], default="keep", help="cache_after_sync (keep)")
    parser.add_argument("--engines", type=int, default=1, help="on each GPU that has any (1)")
    arguments = parse(parser)
    deadline = time.monotonic() + arguments.limit
    prepare(arguments)
    kept = KeptRows(arguments.out, *KEYS)
    jobs, work = [], {}
    for prompts, placement in product(arguments.prompts, placements(arguments)):
        if any(is_missing(identify(prompts, placement, phase), kept.rows) for phase in phases(arguments, placement)):
            jobs.append(make_job(arguments, placement, prompts))
            work[jobs[-1].name] = prompts, placement
    for run in run_jobs(jobs, arguments, deadline=deadline):
        prompts, placement = work[run.job.name]
        for phase in phases(arguments, placement):
            kept.put(summarise(run, placement, prompts, phase))
            say(format_table(kept.rows[-1:]).splitlines()[-1])
    finish(arguments, [row | {"x colocated": compare(row, kept.rows)} for row in kept.rows])


if __name__ == "__main__":
    main()
