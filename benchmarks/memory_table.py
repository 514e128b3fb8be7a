"""Memory of a GPU that trainer and engine share: each phase's peak, planned and measured, and the longest context.

    python benchmarks/memory_table.py --model 0.6b 1.7b
    python benchmarks/memory_table.py --part longest --fraction 0.9

Part "phases" runs a few steps of 64 prompts x 8 completions, of --max-new-tokens and --microbatch-tokens. "device" is
the most that all processes use at any time of a phase, "needed" the same without the unused blocks that PyTorch's
allocator gives back when memory is short, beside what `rlightning plan` says of it; "tensors" what tensors of the
trainer's process take at most, beside the planned parts that are such. A sync ends with an engine that is awake, so
that the device is then as full as during generation, which is planned by itself. Activations are checkpointed where the
plan asks for it.

Part "longest" asks the plan for the longest sequence that 64 x 8 of them can have, with activation checkpointing and
one sequence a micro-batch, whatever positions the model was made for. Then it runs some steps with an engine and a
trainer set up for --fraction of it: the engine, which has its KV cache from the start, generates short completions, and
in their place the update gets two of that length.

A run that fails, or for which --limit leaves no time, is left out, and what an earlier call with the same --out has
measured stays in the tables.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from launch import (
    BENCHMARKS,
    GIB,
    PROMPT_TOKENS,
    RUN_TIMEOUT,
    Job,
    KeptRows,
    Rows,
    Run,
    benchmark_parser,
    callback,
    finish,
    fit,
    format_table,
    grpo_config,
    models_in_time,
    say,
    write_run,
)

BLOCK_TOKENS = 256
START_SECONDS = 60.0
"""With less time left no run is begun."""


def make_job(
    arguments: argparse.Namespace, name: str, new_tokens: int, microbatch_tokens: int, probes: list[dict[str, Any]]
) -> Job:
    """A run whose engine shares the GPU with the trainer."""
    config = grpo_config(
        arguments,
        prompts_per_step=arguments.prompts,
        samples_per_prompt=arguments.samples,
        model={
            "max_tokens_per_microbatch": microbatch_tokens,
            "gradient_checkpointing": arguments.part == "longest" or arguments.checkpointing or "auto",
            "validate_first": False,
            "kl_coef": 0.0,
        },
        rollout={"max_new_tokens": new_tokens, "verify_every": 1000},
        callbacks=[*probes, callback("device_poll.DevicePeaks"), callback("EmptyCacheAfterUpdate")],
    )
    return Job(name, config)


def plan(arguments: argparse.Namespace, job: Job) -> Any:
    """The plan of a job, with the engine's share that it suggests, which the job is given."""

    from rlightning.cli.plan import parse_work
    from rlightning.memory_plan.devices import read_device_memory
    from rlightning.memory_plan.phases import MemoryPlan

    def read() -> Any:
        _, command = write_run(arguments, job)
        return MemoryPlan(parse_work(command), read_device_memory(arguments.device_memory))

    share = read().suggested_utilization()
    if share is None:
        raise SystemExit(f"{job.name}: the plan has no room for an engine on {arguments.device_memory}.")
    job.config["rollout"]["gpu_memory_utilization"] = share
    return read()


def stretch_positions(model: str, positions: int, folder: Path) -> str:
    """The same model with other ``max_position_embeddings``; its weights are links."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in Path(model).iterdir():
        target = folder / path.name
        target.unlink(missing_ok=True)
        if path.name == "config.json":
            target.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": positions}))
        else:
            target.symlink_to(path.resolve())
    return str(folder)


def tabulate_phases(run: Run, planned: Any, model: str) -> Rows:
    """A row a phase: the most of all steps after the first, in which torch.compile works."""
    traces = [row for row in run.read_trace("peaks") if int(row["step"]) > 1]
    rows: Rows = []
    awake = planned.generate().total
    for phase, parts in planned.phases().items():
        measured = [row for row in traces if row["phase"] == phase]
        if not measured:
            continue
        used, needed, allocated = (
            max(int(row[name]) for row in measured) / GIB for name in ("used", "needed", "allocated")
        )
        total = max(parts.total, awake if phase == "sync" else 0) / GIB
        own = parts.tensors / GIB
        row = {"model": model, "phase": phase, "device, GiB": used, "needed": needed, "planned": total}
        row |= {"planned / needed": None}
        row |= {"tensors, GiB": allocated, "planned tensors": own, "planned / tensors": None}
        if used and allocated:
            row |= {"planned / needed": total / needed, "planned / tensors": own / allocated}
        rows.append(row)
    return rows


def measure_phases(arguments: argparse.Namespace, name: str, timeout: float) -> tuple[Rows, Run]:
    """Peaks of each phase."""
    job = make_job(arguments, f"{name}/phases", arguments.max_new_tokens, arguments.microbatch_tokens, [])
    planned = plan(arguments, job)
    run = fit(job, arguments, [0], timeout=timeout)
    return tabulate_phases(run, planned, name), run


def measure_longest(arguments: argparse.Namespace, name: str, timeout: float) -> tuple[Rows, Run]:
    """The longest sequence that is planned for, and a run at a fraction of it."""
    original = arguments.model
    arguments.model = stretch_positions(original, arguments.positions, arguments.out / name / "model")
    first = make_job(arguments, f"{name}/longest", BLOCK_TOKENS, PROMPT_TOKENS + BLOCK_TOKENS, [])
    longest = plan(arguments, first).longest_sequence()
    tried = max(int(arguments.fraction * longest) // BLOCK_TOKENS * BLOCK_TOKENS, PROMPT_TOKENS + BLOCK_TOKENS)
    probes = [
        callback("synthetic.Schedule", sizes=[[arguments.prompts, 16]]),
        callback("synthetic.Stretch", length=tried, count=2),
    ]
    job = make_job(arguments, f"{name}/longest", tried - PROMPT_TOKENS, tried, probes)
    planned = plan(arguments, job)
    run = fit(job, arguments, [0], timeout=timeout)
    peaks = [row for row in run.read_trace("peaks") if row["phase"] in ("update", "generate")]
    used = {phase: max((int(p["used"]) for p in peaks if p["phase"] == phase), default=0) for phase in planned.phases()}
    row: dict[str, Any] = {"model": name, "planned longest": longest, "tried": tried}
    for phase in ("generate", "update"):
        row |= {f"{phase}, GiB": used[phase] / GIB, f"{phase} planned": planned.phases()[phase].total / GIB}
    return [row | {"steps": len(run.metrics()), "end": run.end}], run


def main() -> None:
    """Measure each model, then print the tables."""
    usual: dict[str, Any] = {"prompts": 64, "samples": 8, "max_new_tokens": 256, "microbatch_tokens": 16384}
    usual |= {"model": ["0.6b", "1.7b", "4b"], "limit": 4 * RUN_TIMEOUT}
    parser = benchmark_parser(__doc__ or "", "memory_table", steps=3, **usual)
    parser.add_argument("--part", nargs="+", choices=["phases", "longest"], default=["phases", "longest"], dest="parts")
    parser.add_argument("--device-memory", default="H200", help="as of `rlightning plan` (H200)")
    parser.add_argument("--checkpointing", action="store_true", help="activation checkpointing in part phases too")
    parser.add_argument("--fraction", type=float, default=0.9, help="of the planned longest sequence, tried (0.9)")
    parser.add_argument("--positions", type=int, default=1 << 20, help="no sequence is longer (1048576)")
    arguments = parser.parse_args()
    arguments.deadline, arguments.notes = time.monotonic() + arguments.limit, []
    sys.path[:0] = [str(BENCHMARKS.parent)]
    os.environ["HF_HUB_OFFLINE"] = "1"
    parts = {"phases": measure_phases, "longest": measure_longest}
    arguments.out.mkdir(parents=True, exist_ok=True)
    phases, longest = KeptRows(arguments.out, "model", "phase"), KeptRows(arguments.out / "longest", "model")
    for part in arguments.parts:
        kept = phases if part == "phases" else longest
        arguments.part = part
        for name, named, seconds in models_in_time(arguments, START_SECONDS):
            rows, run = parts[part](named, name, seconds)
            for row in rows:
                kept.put(row)
                say(format_table([row]).splitlines()[-1])
            if run.exit_code:
                arguments.notes.append(f"{part} of {name}: {run.end} ({run.folder / 'run.log'})")
    finish(arguments, phases.rows, [format_table(longest.rows), *arguments.notes])


if __name__ == "__main__":
    main()
