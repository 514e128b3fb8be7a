"""Whether the canary tells rounding from wrong weights at real sizes: false alarms, and strikes that it has to tell.

    python benchmarks/canary.py --model 0.6b 1.7b 4b 8b --syncs 1000
    python benchmarks/canary.py --model 0.6b --precision 32-true
    python benchmarks/canary.py --adapter '{"rank": 32}' --lr 1e-4

One `rlightning fit` a model, on one device, with a vLLM engine that does not sleep, and the product's own weight syncs,
all of them verified. Before its first step, and instead of it: after an update the engine is sent other weights than
the actor has (strikes.py lists how), then the right ones; and after further updates the right ones until --syncs are
reached. An update adds or subtracts --lr, as Adam's first does, or a tenth or a hundredth of it, or nothing. --steps
has training follow. 8B fits an H200, 4B an H100.

The first table has a row a model: syncs of right weights, false alarms among them, the largest distance from the actor
as a multiple of its noise, and the largest number of standard errors on the way back to former weights (above 1.2, and
above 6 of them with a share above 0.1, the canary raises). The milliseconds are medians. The second has a row a
strike: what part of the parameters is wrong, and by how much (root mean square of the difference over that of the
right ones), and whether the canary told. Where it did not, that is the size of what cannot be told from rounding.
With --adapter all of this is an adapter's, which is sent alone; strikes at its proof, in which B has a large effect,
are named so, and B of the others is as large as 100 updates in one direction make it.

A run that fails, or for which --limit leaves no time, does not hold up the others; strikes come before syncs, of which
there are fewer where time is short. What an earlier call with the same --out has measured stays in the tables.
"""

import argparse
import json
import os
import time
from typing import Any

from launch import (
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
    middle,
    models_in_time,
    say,
)

ROOM = 20.0
"""Seconds before a run's end at which its last sync has to be done."""


def make_job(arguments: argparse.Namespace, name: str, timeout: float) -> Job:
    """One run, which ends by itself."""
    until = time.time() + timeout - ROOM
    config = grpo_config(
        arguments,
        prompts_per_step=2,
        samples_per_prompt=2,
        # No step needs them; but the run is refused where its planned update would have no room.
        model={"optimizer_states": "8bit", "gradient_checkpointing": True, "adapter": arguments.adapter},
        rollout={
            "dtype": "bfloat16" if arguments.precision.startswith("bf16") else "float32",
            "max_new_tokens": 8,
            "gpu_memory_utilization": arguments.utilization,
            "sleep": False,
            "verify_every": 1,
            "engine": {"enforce_eager": True, "max_num_seqs": 16},
        },
        callbacks=[
            callback(
                "strikes.StrikeAdapter" if arguments.adapter else "strikes.StrikeWeights",
                syncs=arguments.syncs,
                lr=arguments.lr,
                until=until,
            )
        ],
    )
    steps = {"min_epochs": 0, "min_steps": arguments.steps, "max_steps": max(arguments.steps, 1)}
    config["trainer"] |= {"precision": arguments.precision} | steps
    return Job(f"{name}-{arguments.precision}", config)


def largest(rows: list[dict[str, str]], value: str, unit: str | None = None) -> float | None:
    """The largest value of a trace, or its largest multiple of another column."""
    values = [float(row[value]) / (float(row[unit]) if unit else 1.0) for row in rows if row[value]]
    return max(values, default=None)


def milliseconds(rows: list[dict[str, str]]) -> float | None:
    """The median of a trace's seconds."""
    return middle(1000 * float(row["seconds"]) for row in rows)


def summarise(run: Run, model: str, precision: str) -> dict[str, Any]:
    """A model's row."""
    syncs, parts = run.read_trace("syncs"), run.read_trace("parts")
    whole = [row for row in syncs if row["scale"] == "1.0"]  # of nothing any share may be
    return {
        "model": model,
        "precision": precision,
        "syncs": len(syncs),
        "false alarms": sum(bool(row["alarm"]) for row in syncs),
        "largest distance / noise": largest(syncs, "distance", "noise"),
        "largest errors": largest(syncs, "errors"),
        "largest share after a whole update": largest(whole, "share"),
        "evaluate, ms": milliseconds([row for row in parts if row["part"] == "evaluate"]),
        "score, ms": milliseconds([row for row in parts if row["part"] == "score"]),
        "sync, ms": milliseconds(syncs[1:]),
        "end": run.end,
    }


def list_strikes(run: Run, model: str, precision: str) -> Rows:
    """A row a strike."""
    return [
        {
            "model": model,
            "precision": precision,
            "strike": row["strike"],
            "parameters, %": 100 * float(row["parameters"]),
            "off by, %": 100 * float(row["change"]),
            "told": row["alarm"] or "no",
            "distance / noise": float(row["distance"]) / float(row["noise"]),
            # Of other weights they are of another way, and of the first sync there are none.
            "share": float(row["share"]) if row["share"] and row["alarm"] != "other weights" else None,
            "errors": float(row["errors"]) if row["errors"] and row["alarm"] != "other weights" else None,
        }
        for row in run.read_trace("strikes")
    ]


def main() -> None:
    """Run each model, then print the tables."""
    usual: dict[str, Any] = {"model": ["0.6b", "1.7b", "4b"], "utilization": 0.3, "limit": 4 * RUN_TIMEOUT}
    parser = benchmark_parser(__doc__ or "", "canary", steps=0, **usual)
    parser.add_argument("--syncs", type=int, default=200, help="of right weights (200)")
    parser.add_argument("--lr", type=float, default=1e-5, help="of the updates (1e-5)")
    parser.add_argument("--adapter", type=json.loads, metavar="JSON", help="of an adapter, such as '{\"rank\": 32}'")
    parser.add_argument("--precision", help="bf16-mixed or 32-true (by the device)")
    arguments = parser.parse_args()
    arguments.precision = arguments.precision or ("bf16-mixed" if arguments.device == "cuda" else "32-true")
    arguments.deadline, arguments.notes = time.monotonic() + arguments.limit, []
    os.environ["HF_HUB_OFFLINE"] = "1"
    runs = KeptRows(arguments.out, "model", "precision")
    strikes = KeptRows(arguments.out / "strikes", "model", "precision", "strike")
    for name, named, left in models_in_time(arguments, ROOM):
        run = fit(make_job(named, name, left), named, [0], timeout=left)
        row = summarise(run, name, arguments.precision)
        runs.put(row)
        say(format_table([row]))
        for strike in list_strikes(run, name, arguments.precision):
            strikes.put(strike)
        if run.exit_code:
            arguments.notes += [
                f"{name} ended early:",
                *(run.folder / "run.log").read_text(errors="replace").splitlines()[-15:],
            ]
    finish(arguments, runs.rows, [format_table(strikes.rows), *arguments.notes])


if __name__ == "__main__":
    main()
