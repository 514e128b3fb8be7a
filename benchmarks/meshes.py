"""The update alone on one GPU and on several, by FSDP, HSDP and tensor parallelism: MFU, planned memory, gradients.

    python benchmarks/meshes.py --model 0.6b 4b 8b
    python benchmarks/meshes.py --model 0.6b --mesh one fsdp --same-batch
    python benchmarks/meshes.py --device cpu --model tiny --tokens 2500 --max-new-tokens 64 --microbatch-tokens 1024

A run is `rlightning fit` on completions of random tokens, without an engine; see update.py. Every combination of
--model and --mesh is one: "one" is one GPU, "fsdp" shards over all --gpus, "hsdp" over two at a time, each pair a copy,
and "tensor" splits each layer over two, with FSDP over the pairs. "one-fsdp" has to be named: one GPU, with what FSDP
does beside its collectives. A GPU has --tokens a step in all of them. Runs on one GPU are at the same time, each on its
own. All runs of a model on --gpus have the same global batch; with --same-batch those on one GPU have it too.

A row a run: medians of the updates after the warm-up. The seconds are the slowest rank's, the MFU (docs/performance.md)
is the mean of the ranks', the peak is of tensors on the rank where it is largest, beside what `rlightning plan` says of
them and of the layers whose activations are computed twice. "off by" is the largest relative difference of all steps
from the first run of the model with the same global batch: of the tokens' log-probabilities (their mean distance from
those of equally likely tokens), of the entropy, and of the gradient's norm.

With --profile two further, shorter updates of each mesh of several are profiled on rank 0, as by update.py.

A run that fails is a row, and one for which --limit leaves no time a note. What an earlier call with the same --out has
measured stays in the table. `steps.csv` has the steps of all runs.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from defaults import device_memory, plan
from kernels import describe, read_trace
from launch import (
    BENCHMARKS,
    GIB,
    PROMPT_TOKENS,
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
    parse,
    prepare,
    say,
    write_csv,
)

MESHES: dict[str, dict[str, Any] | None] = {
    "one": None,
    "one-fsdp": {},
    "fsdp": {},
    "hsdp": {"shard_size": 2},
    "tensor": {"tensor_parallel_size": 2},
}
"""Arguments of FSDP by the mesh's name; None without it."""
SINGLE = ("one", "one-fsdp")
"""Meshes of one GPU."""
CURVES = {"log-probs": "policy/rollout_gap_mean", "entropy": "policy/entropy", "grad norm": "optim/grad_norm"}
"""Metrics that are compared step by step. The loss is not among them: in GRPO's first update it is 0."""
PROFILED_MICROBATCHES = 3
START_SECONDS = 30.0
"""With less time left no run is started."""


def make_job(arguments: argparse.Namespace, model: str, mesh: str) -> Job:
    """A model on a mesh; ``arguments.model`` is its folder."""
    num_gpus, fsdp = 1 if mesh in SINGLE else arguments.gpus, MESHES[mesh]
    shares = arguments.gpus if arguments.same_batch else num_gpus
    group_tokens = arguments.samples * (PROMPT_TOKENS + arguments.max_new_tokens)
    num_profiled = 2 if arguments.profile and num_gpus > 1 else 0
    steps = arguments.steps + num_profiled
    rollout = callback(
        "synthetic.SyntheticRollout",
        max_new_tokens=arguments.max_new_tokens,
        short_steps=num_profiled,
        short_tokens=PROFILED_MICROBATCHES * arguments.microbatch_tokens,
    )
    profiles = [
        callback("synthetic.ProfileUpdate", step=steps - 1, name="kernels", has_host=False),
        callback("synthetic.ProfileUpdate", step=steps, name="host", has_host=True),
    ]
    config = grpo_config(
        arguments,
        prompts_per_step=max(round(arguments.tokens / group_tokens), 1) * shares,
        samples_per_prompt=arguments.samples,
        num_devices=num_gpus,
        model={"max_tokens_per_microbatch": arguments.microbatch_tokens, "validate_first": False},
        callbacks=[
            rollout,
            callback("synthetic.SetRewards", alike=0.0),
            callback("synthetic.UpdateTrace"),
            *profiles[:num_profiled],
        ],
    )
    config["rollout"] = None
    config["trainer"] |= {"max_steps": steps, "enable_progress_bar": False}
    if fsdp is not None:
        config["trainer"]["strategy"] = {"class_path": "rlightning.parallel.FSDP", "init_args": fsdp | arguments.fsdp}
    return Job(f"{model}/{mesh}", config, num_gpus)


def measure(run: Run, model: str, mesh: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What a run has measured; None where it did not come so far."""
    settings = run.job.config["model"]["init_args"]
    sequences = settings["prompts_per_step"] * settings["samples_per_prompt"]
    num_gpus, tokens = run.job.num_devices, sequences * (PROMPT_TOKENS + arguments.max_new_tokens)
    ranks = [run.read_trace("update", rank) for rank in range(num_gpus)]
    steps = list(zip(*ranks, strict=False))  # ranks of a run that has failed may have come to different steps
    steps = steps[: arguments.steps]
    slowest = [max(float(row["seconds"]) for row in rows) for rows in steps]
    counted = slowest[arguments.warm_up :]
    mfus = [fmean(float(row["mfu"]) for row in rows) for rows in steps[arguments.warm_up :] if rows[0]["mfu"]]
    peak = max((int(row["peak"]) for rows in ranks for row in rows), default=0)
    metrics = run.metrics()
    return {
        "model": model,
        "GPUs": num_gpus,
        "mesh": mesh,
        "tokens": tokens,
        "micro-batches": math.ceil(tokens / num_gpus / arguments.microbatch_tokens),
        "seconds": median(counted) if counted else None,
        "mfu": median(mfus) if mfus else None,
        "peak": peak / GIB if peak else None,
        "first": slowest[0] if slowest else None,
        "run": run.seconds,
        "end": run.end,
        **{
            name: [row[metric] for row in metrics if metric in row][: arguments.steps]
            for name, metric in CURVES.items()
        },
    }


def largest_difference(values: Iterable[float], reference: Iterable[float]) -> float | None:
    """The largest relative one over the steps that both have; None without any."""
    pairs = zip(values, reference, strict=False)
    return max((abs(value - other) / abs(other) for value, other in pairs if other), default=None)


def tabulate(measured: Rows) -> Rows:
    """The table's rows, with each run beside one GPU and beside the first run with the same batch."""
    models, meshes = list(dict.fromkeys(one["model"] for one in measured)), list(MESHES)
    ordered = sorted(measured, key=lambda one: (models.index(one["model"]), meshes.index(one["mesh"]), one["GPUs"]))
    rows: Rows = []
    for one in ordered:
        same_model = [other for other in ordered if other["model"] == one["model"]]
        rate = _tokens_per_second(one)
        single = next((_tokens_per_second(other) for other in same_model if other["mesh"] == "one"), None)
        same_batch = (other for other in same_model if other["tokens"] == one["tokens"] and other["grad norm"])
        reference = next(same_batch, one)
        row = {
            "model": one["model"],
            "GPUs": one["GPUs"],
            "mesh": one["mesh"],
            "micro-batches": one.get("micro-batches"),
            "update, s": one["seconds"],
            "tokens/s a GPU": rate,
            "MFU a GPU": one["mfu"],
            "x one GPU": rate / single if rate and single else None,
            "peak, GiB": one["peak"],
            "planned": one["planned"],
            "checkpointed": one.get("checkpointed"),
            "beside": None if reference is one else reference["mesh"],
        }
        for name in CURVES:
            row[f"{name} off by"] = None if reference is one else largest_difference(one[name], reference[name])
        rows.append(row | {"first, s": one["first"], "run, s": one["run"], "end": one["end"]})
    return rows


def _tokens_per_second(measured: dict[str, Any]) -> float | None:
    """Of a GPU."""
    return measured["tokens"] / measured["GPUs"] / measured["seconds"] if measured["seconds"] else None


def write_steps(path: Path, measured: Rows) -> None:
    """The curves of all runs, a row a step."""
    rows: Rows = []
    for one in measured:
        for step, values in enumerate(zip(*(one[name] for name in CURVES), strict=False), start=1):
            row = {"model": one["model"], "mesh": one["mesh"], "step": step}
            rows.append(row | dict(zip(CURVES, values, strict=True)))
    write_csv(path, rows)


def parse_arguments() -> argparse.Namespace:
    """The command line, with the deadline."""
    usual: dict[str, Any] = {"samples": 8, "max_new_tokens": 1024, "microbatch_tokens": 16384, "warm_up": 2}
    usual |= {"model": ["0.6b", "4b", "8b"], "limit": 570.0}
    parser = benchmark_parser(__doc__ or "", "meshes", steps=4, **usual)
    usual_meshes = [mesh for mesh in MESHES if mesh != "one-fsdp"]
    parser.add_argument("--mesh", nargs="+", choices=MESHES, default=usual_meshes, help=f"({' '.join(usual_meshes)})")
    parser.add_argument("--gpus", type=int, default=4, help="of each mesh of several (4)")
    parser.add_argument("--tokens", type=int, default=131072, help="a step and GPU, about (131072)")
    parser.add_argument("--same-batch", action="store_true", help="one GPU gets the batch of all, to compare steps")
    parser.add_argument("--fsdp", type=json.loads, default={}, metavar="JSON", help="further arguments of FSDP ({})")
    parser.add_argument("--profile", action="store_true", help="two further, shorter steps")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds of one run (240)")
    arguments = parse(parser)
    arguments.deadline = time.monotonic() + arguments.limit
    return arguments


def run_at_once(jobs: Sequence[Job], arguments: argparse.Namespace, timeout: float) -> list[Run]:
    """Run jobs of one GPU each at the same time, or a single job."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        devices = (range(i, i + job.num_devices) for i, job in enumerate(jobs))
        return list(pool.map(lambda job, at: fit(job, arguments, at, timeout=timeout), jobs, devices))


def read_plan(arguments: argparse.Namespace, job: Job, memory: int) -> dict[str, Any]:
    """What is planned for an update on a device of so many bytes; None for a job that is refused."""
    from rlightning.errors import ConfigError

    try:
        planned = plan(arguments, replace(job, name=f"plans/{job.name}"), memory)
    except ConfigError:
        return {"planned": None, "checkpointed": None}
    checkpointed = f"{planned.count_checkpointed_layers()} of {planned.trainer.num_layers}"
    return {"planned": planned.update().tensors / GIB, "checkpointed": checkpointed}


def main() -> None:
    """Run one GPU's, then the meshes one after the other."""
    arguments = parse_arguments()
    sys.path[:0] = [str(BENCHMARKS.parent)]
    os.environ["HF_HUB_OFFLINE"] = "1"
    named = {Path(model).name: argparse.Namespace(**vars(arguments) | {"model": model}) for model in arguments.model}
    with ThreadPoolExecutor() as pool:
        memory = pool.submit(device_memory, arguments.device)
        list(pool.map(prepare, named.values()))
    kept, notes = KeptRows(arguments.out, "model", "GPUs", "mesh"), []
    work = [(model, mesh, make_job(named[model], model, mesh)) for mesh in arguments.mesh for model in named]
    single = [entry for entry in work if entry[2].num_devices == 1]
    batches = [single[i : i + arguments.gpus] for i in range(0, len(single), arguments.gpus)]
    batches += [[entry] for entry in work if entry not in single]
    with ThreadPoolExecutor(1) as planner:
        # Computed while the runs run.
        plans = {job.name: planner.submit(read_plan, named[model], job, memory.result()) for model, _, job in work}
        for batch in batches:
            left = arguments.deadline - time.monotonic()
            if left < START_SECONDS:
                notes += [f"Left out, as --limit was over: {job.name}." for *_, job in batch]
                continue
            runs = run_at_once([job for *_, job in batch], arguments, min(left, arguments.timeout))
            for (model, mesh, job), run in zip(batch, runs, strict=True):
                kept.put(measure(run, model, mesh, arguments) | plans[job.name].result())
                say(format_table(tabulate(kept.rows[-1:])).splitlines()[-1])
                for path in run.folder.glob("kernels.json.gz"):
                    (run.folder / "kernels.md").write_text(describe(read_trace(path)))
                    say((run.folder / "kernels.md").read_text())
    write_steps(arguments.out / "steps.csv", kept.rows)
    finish(arguments, tabulate(kept.rows), notes)


if __name__ == "__main__":
    main()
