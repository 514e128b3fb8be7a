"""LoRA at real sizes with the README's keys and `adapter`: seconds, memory beside the plan, syncs, full training.

    python benchmarks/adapters.py
    python benchmarks/adapters.py --model 8b@80GB --awake --full --adapter '{"rank": 64}'
    python benchmarks/adapters.py --model --awake --full --trl 4b

Runs are made as in defaults.py, with an adapter on top. --model trains adapters of models, --awake does so beside an
engine that does not sleep during the update, and --full trains all weights of models, to compare with. MODEL@80GB is a
run in a part of the device: PyTorch may use no more of it, what the run chooses by itself it chooses for that much, and
the engine gets its usual share of that.

The first table has a row a run, with medians of the steps after the first; "x full" is its step over that of full
training of the same model. "sync, ms" is a sync until the engine has the weights, unverified. An engine that has slept
on a GPU is sent the base too, so that the adapter alone is sent in runs with --awake. "most, GiB" is the most of the
device that all processes needed in a phase of those steps, to be compared with the plan's and with the budget. The
second table has a row a phase, as in defaults.py.

With --trl, compare_trl.py measures this project and TRL on the same adapter and lengths; its tables follow.

A run that fails, or for which --limit leaves no time, does not hold up the others; what an earlier call with the same
--out has measured stays in the tables.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from defaults import device_memory, make_job, plan, read_plan, summarise
from launch import (
    BENCHMARKS,
    GIB,
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
    middle,
    prepare,
    program_environment,
    run_logged,
    say,
)
from memory_table import tabulate_phases


@dataclass(frozen=True)
class Variant:
    """A run.

    Attributes:
        model: a shape or a folder.
        budget: the part of the device that it may use, such as "80GB"; "" is all of it.
        adapter: what is trained; None is all weights.
        is_awake: whether the engine keeps its memory during the update.
    """

    model: str
    budget: str
    adapter: dict[str, Any] | None
    is_awake: bool = False

    @property
    def columns(self) -> dict[str, str]:
        """What tells it from the others."""
        trained = "all" if self.adapter is None else ", ".join(f"{key} {value}" for key, value in self.adapter.items())
        return {
            "model": Path(self.model).name,
            "budget": self.budget or "-",
            "trained": trained,
            "engine": "awake" if self.is_awake else "sleeps",
        }


def list_variants(arguments: argparse.Namespace) -> Iterator[Variant]:
    """The runs that the command line asks for."""
    for spec in arguments.model:
        yield Variant(*split_budget(spec), arguments.adapter)
    for spec in arguments.awake:
        yield Variant(*split_budget(spec), arguments.adapter, is_awake=True)
    for spec in arguments.full:
        yield Variant(*split_budget(spec), None)


def split_budget(spec: str) -> tuple[str, str]:
    """Model and budget of MODEL@BUDGET."""
    model, _, budget = spec.partition("@")
    return model, budget


def make_run(arguments: argparse.Namespace, variant: Variant) -> tuple[Job, Any]:
    """A variant's job, and the plan of it."""
    from rlightning.memory_plan.devices import read_device_memory

    job = make_job(arguments, "-".join(variant.columns.values()).replace(" ", "_"))
    config, total = job.config, device_memory(arguments.device)
    budget = read_device_memory(variant.budget) if variant.budget else total
    if budget > total:
        raise SystemExit(f"{variant.budget} are needed, and the device has {total / GIB:.1f} GiB.")
    if variant.adapter is not None:
        config["model"]["init_args"]["adapter"] = variant.adapter
    if variant.is_awake:
        config["rollout"]["sleep"] = False
    planned = plan(arguments, job, budget)
    callbacks = config["trainer"]["callbacks"]
    callbacks.append(callback("probes.SyncTrace"))
    if budget < total:
        share = budget / total
        callbacks.insert(0, callback("probes.LimitMemory", share=share))
        config["rollout"]["gpu_memory_utilization"] = planned.engine.utilization * share
    return job, planned


def describe(run: Run, planned: Any, variant: Variant, phases: Rows) -> dict[str, Any]:
    """A variant's row."""
    told = variant.columns | summarise(run, planned, variant.columns["model"])
    syncs = [row for row in run.read_trace("sync") if int(row["step"]) > 1]  # an adapter is proven in the first
    seconds = [float(row["seconds_until_wake"] or row["seconds"]) for row in syncs]
    worst = max(phases, key=lambda row: float(row["needed"]), default=None)
    row = {key: value for key, value in told.items() if key not in ("devices", "engine's share")}
    row["sync, ms"] = middle(1000 * value for value in seconds)
    row["most, GiB"] = worst and worst["needed"]
    row["planned"] = worst and worst["planned"]
    return row | {"end": row.pop("end")}


def compare(rows: Rows) -> Rows:
    """The rows, each with its step over that of full training."""
    full = {row["model"]: row["step, s"] for row in rows if row["trained"] == "all"}
    ratios = [
        row["step, s"] / full[row["model"]] if row["step, s"] and full.get(row["model"]) else None for row in rows
    ]
    return [row | {"x full": ratio} for row, ratio in zip(rows, ratios, strict=True)]


def run_trl(arguments: argparse.Namespace, timeout: float) -> str:
    """What compare_trl.py says of the same adapter."""
    command = [sys.executable, str(BENCHMARKS / "compare_trl.py"), "--model", arguments.trl, "--work", "variable"]
    command += ["--models", str(arguments.models), "--device", arguments.device, "--steps", str(arguments.steps)]
    command += ["--adapter", json.dumps(arguments.adapter), "--out", str(arguments.out / "trl")]
    if arguments.prompts:
        command += ["--prompts", str(arguments.prompts)]
    if arguments.max_new_tokens:
        command += ["--max-new-tokens", str(arguments.max_new_tokens)]
    command += ["--limit", str(timeout), "--", *arguments.options]
    log = arguments.out / "trl.log"
    run_logged(command, log, program_environment(), timeout + RUN_TIMEOUT)
    table = arguments.out / "trl" / "table.md"
    return table.read_text() if table.is_file() else f"compare_trl.py failed ({log})"


def main() -> None:
    """Run what there is time for, then print the tables."""
    parser = benchmark_parser(__doc__ or "", "adapters", steps=5, model=None)
    several = {"nargs": "*", "metavar": "MODEL[@BUDGET]"}
    parser.add_argument("--model", **several, default=["8b@80GB", "14b", "4b"], help="8b@80GB 14b 4b")
    parser.add_argument("--awake", **several, default=["8b@80GB"], help="8b@80GB")
    parser.add_argument("--full", **several, default=["4b"], help="4b")
    parser.add_argument("--trl", default="", metavar="MODEL", help="compare with TRL, see above")
    parser.add_argument("--adapter", type=json.loads, default={"rank": 32}, metavar="JSON", help='{"rank": 32}')
    parser.add_argument("--models", type=Path, default=Path("runs/models"), help="gets made shapes (runs/models)")
    parser.add_argument("--prompts", type=int, help="a step (the README's)")
    parser.add_argument("--max-new-tokens", type=int, help="(the README's)")
    parser.add_argument("--limit", type=float, default=6 * RUN_TIMEOUT, help="seconds of all (5400)")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.limit
    sys.path[:0] = [str(BENCHMARKS.parent)]
    os.environ["HF_HUB_OFFLINE"] = "1"
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.devices = 1
    keys = ("model", "budget", "trained", "engine")
    runs, phases = KeptRows(arguments.out, *keys), KeptRows(arguments.out / "phases", *keys, "phase")
    notes = []
    for variant in list_variants(arguments):
        named = argparse.Namespace(**vars(arguments) | {"model": variant.model})
        prepare(named)
        left = deadline - time.monotonic()
        name = " ".join(variant.columns.values())
        if left <= 0:
            notes.append(f"Left out, as --limit was over: {name}.")
            continue
        job, planned = make_run(named, variant)
        run = fit(job, named, [0], timeout=min(left, RUN_TIMEOUT))
        peaks = [variant.columns | row for row in tabulate_phases(run, planned, variant.columns["model"])]
        for peak in peaks:
            phases.put(peak)
        runs.put(describe(run, planned, variant, peaks))
        say(format_table(runs.rows[-1:]))
        if run.exit_code:
            notes.append(f"{name} ended early: {run.end} The plan: {read_plan(named, run)}")
    if arguments.trl:
        notes.append(run_trl(arguments, max(deadline - time.monotonic(), 1.0)))
    finish(arguments, compare(runs.rows), [format_table(phases.rows), *notes])


if __name__ == "__main__":
    main()
