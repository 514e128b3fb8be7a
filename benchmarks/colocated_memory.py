"""Memory of a GPU that actor and engine share, by step, with and without EmptyCacheAfterUpdate.

    python benchmarks/colocated_memory.py --steps 24 --oom

Three runs of the same steps, each of another completion length: `without` the callback, with it `after_update`, and
with it after the update and before the engine wakes (`before_wake_too`). PyTorch's allocator keeps what it once took
(reserved) whether tensors are in it (allocated) or not, and the engine, another process, finds the rest of the device.

With --oom two more runs: from what the first three left free follows a gpu_memory_utilization at which the engine's
memory fits beside a trainer that empties its cache and does not beside one that does not.

Writes --out/steps.csv and steps.md (each step of each run), curve.svg, table.md and table.csv (the summary).
"""

import argparse
from statistics import median
from typing import Any

from draw import Line, draw
from launch import (
    GIB,
    Job,
    Rows,
    Run,
    benchmark_parser,
    callback,
    finish,
    format_table,
    grpo_config,
    prepare,
    run_jobs,
    say,
    write_csv,
)

ARMS: dict[str, dict[str, Any] | None] = {
    "without": None,
    "after_update": {"before_wake": False},
    "before_wake_too": {"before_wake": True},
}
"""Arguments of EmptyCacheAfterUpdate."""
SETTLED = 5
"""The step from which memory may not grow."""
DEATHS = ("out of memory", "OutOfMemory", "Free memory on device")
"""How CUDA, PyTorch and a restarted vLLM say it."""


def make_job(arguments: argparse.Namespace, arm: str, utilization: float, name: str = "") -> Job:
    """One arm; the traces around the callback see what it does."""
    lengths = callback("probes.VaryLengths", shortest=arguments.shortest, longest=arguments.longest)
    callbacks = [lengths, callback("probes.MemoryTrace", name="before")]
    if (options := ARMS[arm]) is not None:
        callbacks.append(callback("EmptyCacheAfterUpdate", **options))
    callbacks.append(callback("probes.MemoryTrace", name="after"))
    config = grpo_config(
        arguments,
        prompts_per_step=arguments.prompts,
        samples_per_prompt=arguments.samples,
        model={"max_tokens_per_microbatch": arguments.microbatch_tokens},
        rollout={"max_new_tokens": arguments.longest, "gpu_memory_utilization": utilization},
        callbacks=callbacks,
    )
    return Job(name or arm, config)


def read_steps(run: Run) -> Rows:
    """A row a step: GiB after the update, before and after the callback, and when the engine is about to wake."""
    rows: dict[int, dict[str, Any]] = {}
    for trace in ("before", "after"):
        for entry in run.read_trace(trace):
            step = int(entry["step"])
            row = rows.setdefault(step, {"run": run.job.name, "step": step})
            row["max_new_tokens"], row["total"] = int(entry["max_new_tokens"]), int(entry["total"]) / GIB
            if entry["moment"] in ("update_end", "sync_start", "sync_end"):
                for what in ("allocated", "reserved", "free"):
                    row[f"{entry['moment']}/{trace}/{what}"] = int(entry[what]) / GIB
    return list(rows.values())


def column(steps: Rows, name: str, first: int = 1) -> list[float]:
    """The values of one column from a step on; one zero if the run never came there."""
    return [row[name] for row in steps if name in row and row["step"] >= first] or [0.0]


def emptying_ms(metrics: list[dict[str, float]]) -> float | None:
    """What the callback costs a step, at both moments together; None without it."""
    costs = [sum(value for name, value in row.items() if name.endswith("empty_cache_ms")) for row in metrics]
    return median(costs) or None if costs else None


def summarise(run: Run, steps: Rows) -> dict[str, Any]:
    """One run's line of the table. GiB; "settled" is from step 5 on."""
    settled = min(SETTLED, max(row["step"] for row in steps))
    reserved = column(steps, "update_end/after/reserved", settled)
    allocated = column(steps, "update_end/after/allocated", settled)
    metrics = run.metrics()
    return {
        "run": run.job.name,
        "steps": len(metrics),
        "allocated after update": max(allocated),
        "reserved before the callback, max": max(column(steps, "update_end/before/reserved")),
        "reserved after update, max": max(reserved),
        "reserved / allocated, max": max((r / a for r, a in zip(reserved, allocated, strict=True) if a), default=0.0),
        f"reserved, growth after step {SETTLED}": max(reserved) - reserved[0],
        "free before wake, min": min(column(steps, "sync_start/after/free", 2)),
        "free while generating, min": min(column(steps, "sync_end/after/free", 2)),
        "emptying, ms a step": emptying_ms(metrics),
        "step, s": median([row["time/step"] for row in metrics]) if metrics else None,
        "run, s": run.seconds,
    }


def write_steps(arguments: argparse.Namespace, runs: dict[str, Rows]) -> None:
    """All steps as CSV, the curve as Markdown and SVG."""
    rows = [row for steps in runs.values() for row in steps]
    names = list(dict.fromkeys(name for row in rows for name in row))
    write_csv(arguments.out / "steps.csv", [{name: row.get(name) for name in names} for row in rows])
    table: dict[int, dict[str, Any]] = {}
    lines = []
    for i, (arm, steps) in enumerate(runs.items()):
        for row in steps:
            line = table.setdefault(row["step"], {"step": row["step"], "tokens": row["max_new_tokens"]})
            line[f"{arm}: allocated"] = row.get("update_end/after/allocated")
            line[f"{arm}: reserved"] = row.get("update_end/after/reserved")
            line[f"{arm}: reserved before wake"] = row.get("sync_start/after/reserved")
        points = [
            (row["step"], row["update_end/after/reserved"]) for row in steps if "update_end/after/reserved" in row
        ]
        lines.append(Line(points, i, arm))
    whole = max(table.values(), key=len)
    (arguments.out / "steps.md").write_text(
        format_table([{name: row.get(name) for name in whole} for row in table.values()])
    )
    (arguments.out / "curve.svg").write_text(draw(lines, title="reserved after the update, GiB", x_label="step"))


def fatal_utilization(arguments: argparse.Namespace, runs: dict[str, Rows]) -> float:
    """At which the engine needs more than is free without the callback, and less than is free with it.

    An engine that may take a share ``u`` of the device needs ``w + (u - u0) * total`` when it wakes, where ``w`` is
    what it took with the share ``u0``. The answer is in the middle of the two.
    """
    without, emptied = runs["without"], runs["before_wake_too"]
    total: float = without[0]["total"]
    pairs = [(row.get("sync_start/after/free"), row.get("sync_end/after/free")) for row in emptied if row["step"] > 1]
    took = max(before - after for before, after in pairs if before is not None and after is not None)
    least_without = min(column(without, "sync_start/after/free", 2))
    least_emptied = min(column(emptied, "sync_start/after/free", 2))
    utilization: float = arguments.utilization + ((least_without + least_emptied) / 2 - took) / total
    say(
        f"Free before the engine wakes, at least: {least_without:.1f} GiB without the callback, {least_emptied:.1f} "
        f"with it. It takes {took:.1f} at a share of {arguments.utilization}: --oom tries {utilization:.3f}."
    )
    if not arguments.utilization < utilization < 0.95:
        raise SystemExit("No share of the device is between the two. Raise --microbatch-tokens.")
    return round(utilization, 3)


def describe_end(run: Run) -> str:
    """How a run ended, and in which step."""
    log = run.read_log()
    lines = [line.strip() for line in log.splitlines() if any(death in line for death in DEATHS)]
    count = len(run.metrics())
    if run.exit_code == 0:
        return f"{run.job.name}: finished {count} steps"
    reason = lines[0][:300] if lines else f"see {run.folder / 'run.log'}"
    seen = (run.read_trace("after") or [{"moment": "start", "step": "1"}])[-1]
    last = f"last seen at {seen['moment']} of step {seen['step']}"
    return f"{run.job.name}: exit code {run.exit_code} after {count} whole steps, {last}: {reason}"


def main() -> None:
    """Run the arms, then the two at the fatal setting."""
    usual: dict[str, Any] = {"prompts": 16, "samples": 8, "microbatch_tokens": 16384, "utilization": 0.3}
    parser = benchmark_parser(__doc__ or "", "colocated_memory", steps=24, **usual)
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS), help="which runs (all)")
    parser.add_argument("--shortest", type=int, default=64, help="tokens of a completion (64)")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of a completion (1024)")
    parser.add_argument("--oom", action="store_true", help="find and try the setting that dies without the callback")
    parser.add_argument("--oom-utilization", type=float, help="the setting, where it is known already")
    arguments = parser.parse_args()
    if arguments.oom and arguments.oom_utilization is None and not {"without", "before_wake_too"} <= {*arguments.arms}:
        parser.error("--oom needs the runs without and before_wake_too, or --oom-utilization")
    prepare(arguments)
    jobs = [make_job(arguments, arm, arguments.utilization) for arm in arguments.arms]
    finished = [run.require_success() for run in run_jobs(jobs, arguments)] if jobs else []
    steps = {run.job.name: read_steps(run) for run in finished}
    rows = [summarise(run, steps[run.job.name]) for run in finished]
    notes = []
    if steps:
        write_steps(arguments, steps)
    if arguments.oom:
        fatal = arguments.oom_utilization
        if fatal is None:
            say(format_table(rows))
            fatal = fatal_utilization(arguments, steps)
        pair = [("without", "oom_without"), ("before_wake_too", "oom_with")]
        ends = list(run_jobs([make_job(arguments, arm, fatal, name) for arm, name in pair], arguments))
        rows += [summarise(run, read_steps(run)) for run in ends if read_steps(run)]
        notes = [f"gpu_memory_utilization {fatal}:", *(f"- {describe_end(run)}" for run in ends)]
    finish(arguments, rows, notes)


if __name__ == "__main__":
    main()
