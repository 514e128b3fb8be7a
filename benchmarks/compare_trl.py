"""This project and TRL on the same work, one after the other: seconds by phase, tokens/s, MFU and memory, in one table.

    python benchmarks/compare_trl.py
    python benchmarks/compare_trl.py --work fixed --microbatch-tokens 18432 --trl '{"gradient_checkpointing": false}'
    python benchmarks/compare_trl.py --turns 8 --trl '{}' '{"vllm_enable_sleep_mode": false}'

GRPO on one GPU with a colocated vLLM that sleeps during the update, the same prompts, 64 a step with 8 completions
each, random rewards, no reference model, bfloat16. Two kinds of work: "fixed", 1,024 new tokens each, and "variable",
where 445 of 151,936 tokens end a completion besides the end of sequence, which a model of random weights samples after
341 tokens in the mean: lengths spread from 1 to 1,024, and both sides draw them from the same distribution (the table
has the mean and the longest).

This project runs once for each --microbatch-tokens, TRL once for each --trl, the settings in which it differs from the
first: 16 sequences a micro-batch, activation checkpointing, importance sampling correction. By default that is TRL as
it comes, and TRL without the last two, of which this project does neither. Each run is a process of its own. TRL's
weights and optimizer are bfloat16, this project's float32 with bfloat16 compute; `-- --trainer.precision bf16-true`
would change it. With --adapter both train LoRA on all linear layers of a bfloat16 base.

With --turns there are trajectories of so many turns, each of at most a --turns th of --max-new-tokens, and after each
but the last the answer of a tool, which takes --tool-seconds: here a StepEnvironment, in TRL a method of its
`environment_factory`. As a model of random weights writes no calls, each of its turns counts as one. TRL samples a turn
of all trajectories before it calls the tools, one trajectory's after the other's, and its engine, where it sleeps, does
so after each turn.

A run that fails, or for which --limit leaves no time, is left out, and what an earlier call with the same --out has
measured stays in the table: so one may call it again for the rest. "outside" is the share of a step that is neither
generation nor update. Peaks: "update" is what tensors of the trainer's process take at most during the update, "device"
the most that all processes use at any time of a step. "x TRL" is tokens/s over that of TRL's fastest run on that work.
"""

import argparse
import csv
import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from agent_work import ANSWER
from launch import (
    BENCHMARKS,
    GIB,
    PHASES,
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
    middle,
    parse,
    prepare,
    run_logged,
    say,
    write_prompts,
)
from weak_scaling import rare_tokens

WORKS = ("fixed", "variable")
TRL_VARIANTS = ["{}", '{"gradient_checkpointing": false, "vllm_importance_sampling_correction": false}']
START_SECONDS = 60.0
"""With less time left no run is begun."""


def stop_tokens(arguments: argparse.Namespace, work: str) -> list[int]:
    """What ends a turn besides the end of sequence: a third of the longest in the mean; none for fixed work."""
    return rare_tokens(arguments.model, max(longest_turn(arguments) // 3, 1)) if work == "variable" else []


def longest_turn(arguments: argparse.Namespace) -> int:
    """Tokens of a completion's longest turn."""
    return int(arguments.max_new_tokens // arguments.turns)


def longest_completion(arguments: argparse.Namespace) -> int:
    """Tokens of the longest completion, with the answers of tools."""
    return longest_turn(arguments) * arguments.turns + len(ANSWER) * (arguments.turns - 1)


def waits(arguments: argparse.Namespace) -> dict[str, Any]:
    """The environment of completions of several turns."""
    seconds = {"shortest": arguments.tool_seconds, "longest": arguments.tool_seconds}
    game = {"environment": "agent_work.Waits", "arguments": {"num_turns": arguments.turns, **seconds}}
    settings = {**game, "max_turns": arguments.turns}
    return {"class_path": "rlightning.environments.StepEnvironment", "init_args": settings}


def make_job(arguments: argparse.Namespace, work: str, microbatch_tokens: int) -> Job:
    """This project's run."""
    rollout = {
        "max_new_tokens": longest_turn(arguments),
        "gpu_memory_utilization": arguments.utilization,
        "stop_token_ids": stop_tokens(arguments, work),
    }
    if arguments.turns > 1:
        rollout["engine"] = {"max_model_len": PROMPT_TOKENS + longest_completion(arguments)}
    config = grpo_config(
        arguments,
        prompts_per_step=arguments.prompts,
        samples_per_prompt=arguments.samples,
        model={"max_tokens_per_microbatch": microbatch_tokens, "validate_first": False, "kl_coef": 0.0}
        | ({"adapter": arguments.adapter} if arguments.adapter else {}),
        rollout=rollout,
        callbacks=[callback("synthetic.UpdateTrace"), callback("device_poll.DevicePeaks")],
    )
    if arguments.turns > 1:
        config["environment"] = waits(arguments)
    return Job(f"{work}/rlightning_{microbatch_tokens}", config)


def read_own(run: Run) -> Rows:
    """A row a step of this project."""
    updates, peaks = run.read_trace("update"), run.read_trace("peaks")
    rows: Rows = []
    for step, (metrics, update) in enumerate(zip(run.metrics(), updates, strict=False), start=1):
        seconds = {phase: metrics.get(f"time/{phase}", 0.0) for phase in PHASES}
        used = [int(peak["used"]) for peak in peaks if int(peak["step"]) == step]
        rows.append(
            {
                "seconds": metrics["time/step"],
                **seconds,
                "other": metrics["time/step"] - sum(seconds.values()),
                "tokens": metrics["throughput/tokens_per_second"] * metrics["time/step"],
                "mean_tokens": metrics["completion/length"],
                "longest": metrics["completion/length_max"],
                **{name: float(update[name]) if update[name] else None for name in ("mfu", "six_n_mfu")},
                "allocated": float(update["peak"]),
                "used": float(max(used, default=0)),
            }
        )
    return rows


def trl_settings(arguments: argparse.Namespace, work: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Arguments of TRL's GRPOConfig."""
    is_cuda = arguments.device == "cuda"
    completions = arguments.prompts * arguments.samples
    microbatch = min(changes.get("per_device_train_batch_size", 16), completions)
    settings: dict[str, Any] = {
        "per_device_train_batch_size": microbatch,
        "gradient_accumulation_steps": completions // microbatch,
        "num_generations": arguments.samples,
        "max_completion_length": longest_completion(arguments),
        "max_steps": arguments.steps,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "beta": 0.0,
        "temperature": 1.0,
        "gradient_checkpointing": True,
        "bf16": is_cuda,
        "model_init_kwargs": {"dtype": "bfloat16" if is_cuda else "float32"},
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": not is_cuda,
        "use_vllm": is_cuda,
    }
    if is_cuda:
        settings |= {
            "vllm_mode": "colocate",
            "vllm_enable_sleep_mode": True,
            "vllm_gpu_memory_utilization": arguments.utilization,
            "vllm_max_model_length": PROMPT_TOKENS + longest_completion(arguments),
        }
    sampling: dict[str, Any] = {}
    if tokens := stop_tokens(arguments, work):
        sampling |= {"stop_token_ids": tokens} if is_cuda else {"eos_token_id": [0, *tokens]}
    if arguments.turns > 1:
        sampling["max_tokens" if is_cuda else "max_new_tokens"] = longest_turn(arguments)
        settings["max_tool_calling_iterations"] = arguments.turns - 1
    return settings | {"generation_kwargs": sampling} | changes


def run_trl(arguments: argparse.Namespace, work: str, changes: str, timeout: float) -> tuple[str, Rows, str]:
    """TRL's run in a process of its own.

    Returns:
        The side's name, a row a step, and how it ended, empty if well.
    """
    name = "TRL" if json.loads(changes) == {} else f"TRL {changes}"
    folder: Path = arguments.out / work / f"trl_{arguments.trl.index(changes)}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "steps.csv"
    path.unlink(missing_ok=True)
    settings = trl_settings(arguments, work, json.loads(changes))
    command = [sys.executable, str(BENCHMARKS / "trl_steps.py"), "--model", arguments.model]
    command += ["--prompts", str(arguments.out / "prompts.jsonl"), "--out", str(path)]
    command += ["--settings", json.dumps(settings), "--adapter", json.dumps(arguments.adapter)]
    command += ["--tool-seconds", str(arguments.tool_seconds)] if arguments.turns > 1 else []
    paths = [str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
    exit_code = run_logged(command, folder / "run.log", environment, timeout)
    rows: Rows = []
    if path.exists():
        with path.open(newline="") as file:
            rows = [
                {key: float(value) if value else None for key, value in row.items()} for row in csv.DictReader(file)
            ]
    for row in rows:
        row["mean_tokens"] = row["completion_tokens"] / (arguments.prompts * arguments.samples)
    return name, rows, describe_end(exit_code, folder / "run.log")


def describe_end(exit_code: int, log: Path) -> str:
    """How a run ended, empty if well."""
    if exit_code == 0:
        return ""
    last = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
    return f"exit code {exit_code}: {''.join(last)[:160]} ({log})"


def summarise(work: str, side: str, rows: Rows, warm_up: int) -> dict[str, Any]:
    """One line: medians over the steps after the warm-up, the largest of peaks."""
    counted = rows[warm_up:]

    def usual(name: str) -> float | None:
        return middle(row[name] for row in counted if row.get(name) is not None)

    return {
        "work": work,
        "side": side,
        "step, s": usual("seconds"),
        **{f"{phase}, s": usual(phase) for phase in (*PHASES, "other")},
        "outside, %": median(100 * (1 - (row["generate"] + row["update"]) / row["seconds"]) for row in counted),
        "tokens/s": median(row["tokens"] / row["seconds"] for row in counted),
        "MFU": usual("mfu"),
        "MFU, 6N": usual("six_n_mfu"),
        "update, GiB": max(row["allocated"] for row in counted) / GIB,
        "device, GiB": max(row["used"] for row in counted) / GIB,
        "mean length": usual("mean_tokens"),
        "longest": max(row["longest"] for row in counted),
        "steps": len(counted),
    }


def compare(lines: Rows) -> Rows:
    """The lines, works together, each with its tokens/s over those of TRL's fastest run."""
    table: Rows = []
    for work in WORKS:
        chosen = [line for line in lines if line["work"] == work]
        best = max((line["tokens/s"] for line in chosen if line["side"].startswith("TRL")), default=None)
        table += [line | {"x TRL": line["tokens/s"] / best if best else None} for line in chosen]
    return table


def main() -> None:
    """Run what there is time for; then the table of all that is there."""
    usual: dict[str, Any] = {"prompts": 64, "samples": 8, "max_new_tokens": 1024, "utilization": 0.4, "warm_up": 1}
    parser = benchmark_parser(__doc__ or "", "compare_trl", steps=4, limit=4 * RUN_TIMEOUT, **usual)
    parser.add_argument("--work", nargs="+", choices=WORKS, default=list(WORKS), help="fixed variable")
    parser.add_argument("--microbatch-tokens", type=int, nargs="*", default=[18432, 32768], help="18432 32768")
    parser.add_argument("--adapter", type=json.loads, default={}, metavar="JSON", help="rank and alpha of LoRA (none)")
    parser.add_argument("--trl", nargs="*", default=TRL_VARIANTS, metavar="JSON", help="see above")
    parser.add_argument("--turns", type=int, default=1, help="of a completion (1)")
    parser.add_argument("--tool-seconds", type=float, default=0.0, help="between two turns (0)")
    arguments = parse(parser)
    deadline = time.monotonic() + arguments.limit
    prepare(arguments)
    if not (arguments.out / "prompts.jsonl").is_file():
        write_prompts(arguments.out / "prompts.jsonl", 4096)
    kept = KeptRows(arguments.out, "work", "side")
    notes = []
    sides = [*(("rlightning", size) for size in arguments.microbatch_tokens), *(("TRL", c) for c in arguments.trl)]
    for work in arguments.work:
        for kind, setting in sides:
            left = deadline - time.monotonic()
            if left < START_SECONDS:
                notes.append(f"Left out, as --limit was over: {kind} {setting} on {work} work.")
                continue
            if kind == "TRL":
                side, rows, end = run_trl(arguments, work, setting, min(left, RUN_TIMEOUT))
            else:
                run = fit(make_job(arguments, work, setting), arguments, [0], timeout=min(left, RUN_TIMEOUT))
                side, rows = f"rlightning, {setting} tokens", read_own(run)
                end = describe_end(run.exit_code, run.folder / "run.log")
            if end:
                notes.append(f"{side} on {work} work, after {len(rows)} steps: {end}")
            if len(rows) > arguments.warm_up:
                kept.put(summarise(work, side, rows, arguments.warm_up))
                say(format_table(kept.rows).splitlines()[-1])
    finish(arguments, compare(kept.rows), notes)


if __name__ == "__main__":
    main()
