"""Real sizes with nothing but the README's first YAML: seconds by phase, memory beside the plan, what was chosen.

    python benchmarks/defaults.py --model 0.6b 1.7b 4b
    python benchmarks/defaults.py --model 8b --devices 2

The YAML is read from README.md. Changed are the model (a made shape, or a folder), where its prompts and outputs are,
how many steps there are, that no checkpoint is written, and the reward: an untrained model has no answer right, and a
run without any signal ends. The lengths of completions are spread as a sampler spreads them that ends with 3 chances in
`max_new_tokens` after each token: so many of a random model's tokens, which are all about equally likely, are
`stop_token_ids`. With --devices 2 and more the file gets `devices` and `strategy: fsdp2`, and each device a full step's
prompts.

The first table has a row a model: the median seconds of the steps after the first, in which graphs are made, the wait
for the engine's start in the first, and what the run chose by itself. Or how it ended, and what `rlightning plan` says
of the same file. The second has a row a phase: the most that all processes use of a device, and need, beside the
plan (see memory_table.py).

A run that fails, or for which --limit leaves no time, does not hold up the others; what an earlier call with the same
--out has measured stays in the tables.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from launch import (
    BENCHMARKS,
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
    middle,
    models_in_time,
    program_environment,
    run_logged,
    say,
    write_run,
)
from memory_table import tabulate_phases
from weak_scaling import rare_tokens

CHANCES_TO_END = 3


def read_readme() -> dict[str, Any]:
    """The first YAML file of README.md."""
    text = (BENCHMARKS.parent / "README.md").read_text()
    match = re.search(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert match is not None, "README.md has no YAML"
    config: dict[str, Any] = yaml.safe_load(match[1])
    return config


def make_job(arguments: argparse.Namespace, name: str) -> Job:
    """The README's file with another model, and what a model without any training needs."""
    config = read_readme()
    settings, trainer = config["model"]["init_args"], config["trainer"]
    settings |= {"model": arguments.model, "rewards": ["rewards.random_reward"]}
    settings["prompts_per_step"] = arguments.prompts or settings["prompts_per_step"] * arguments.devices
    config["data"] |= {"train": write_questions(arguments.out / "questions.jsonl")}
    trainer |= {"max_steps": arguments.steps, "enable_checkpointing": False}
    trainer |= {"callbacks": [callback("device_poll.DevicePeaks")]}
    if arguments.device == "cpu":
        trainer |= {"accelerator": "cpu", "precision": "32-true"}
    if arguments.max_new_tokens:
        config["rollout"]["max_new_tokens"] = arguments.max_new_tokens
    if arguments.devices > 1:
        trainer |= {"devices": arguments.devices, "strategy": "fsdp2"}
    ends = rare_tokens(arguments.model, config["rollout"]["max_new_tokens"] // CHANCES_TO_END)
    config["rollout"] |= {"stop_token_ids": ends}
    return Job(f"{name}-{arguments.devices}", config, arguments.devices)


def write_questions(path: Path, count: int = 4096) -> str:
    """Prompts of letters, a token each, with answers; the file's name."""
    letters = random.Random(0)
    with path.open("w") as file:
        for number in range(count):
            question = "".join(letters.choices("abcdefgh ", k=PROMPT_TOKENS))
            file.write(json.dumps({"question": question, "answer": f"#### {number}"}) + "\n")
    return str(path)


def plan(arguments: argparse.Namespace, job: Job, memory: int | None = None) -> Any:
    """What `rlightning plan` computes for the same file on the same device, or on one with so many bytes."""

    from rlightning.cli.plan import parse_work
    from rlightning.memory_plan.phases import MemoryPlan

    _, command = write_run(arguments, job)
    return MemoryPlan(parse_work(command), memory or device_memory(arguments.device))


def device_memory(device: str) -> int:
    """Bytes of a device; asked by another process, for one that has used a GPU keeps some of its memory."""
    if device == "cpu":
        return 8 << 30
    code = "import torch; print(torch.cuda.get_device_properties(0).total_memory)"
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def read_plan(arguments: argparse.Namespace, run: Run) -> str:
    """The last lines of `rlightning plan` for a run's file."""
    log = run.folder / "plan.txt"
    memory = f"{device_memory(arguments.device) / (1 << 30):.2f}GiB"
    command = ["plan", "--config", str(run.folder / "run.yaml"), "--device-memory", memory]
    run_logged([sys.executable, "-m", "rlightning", *command], log, program_environment(), RUN_TIMEOUT)
    return (log.read_text().strip().splitlines() or [""])[-1]


def chosen_share(run: Run) -> str:
    """``rollout.gpu_memory_utilization`` as the run says that it is; "" on a device without such a share."""
    said = re.search(r"(\d+)% of the device's memory", (run.folder / "run.log").read_text(errors="replace"))
    return f"0.{said[1]:0>2}" if said is not None else ""


def summarise(run: Run, planned: Any, name: str) -> dict[str, Any]:
    """A model's row."""
    steps = run.metrics()
    later = steps[1:] or steps
    row: dict[str, Any] = {"model": name, "devices": run.job.num_devices, "steps": len(steps)}
    row["step, s"] = middle(step["time/step"] for step in later)
    for phase in PHASES:
        row[f"{phase}, s"] = middle(step[f"time/{phase}"] for step in later if f"time/{phase}" in step)
    row["first step, s"] = steps[0]["time/step"] if steps else None
    row["of it engine's start, s"] = steps[0].get("time/engine_start", 0.0) if steps else None
    row["engine's share"] = chosen_share(run)
    row["layers checkpointed"] = f"{planned.count_checkpointed_layers()} of {planned.trainer.num_layers}"
    row["planned to wait on the host"] = ", ".join(planned.moved().by_name()) or "nothing"
    return row | {"end": run.end}


def measure(arguments: argparse.Namespace, name: str, timeout: float) -> tuple[dict[str, Any], Rows, Run]:
    """Run one model; its row, its phases' rows, and the run."""
    job = make_job(arguments, name)
    planned = plan(arguments, job)
    run = fit(job, arguments, range(arguments.devices), timeout=timeout)
    phases = [{"devices": arguments.devices} | row for row in tabulate_phases(run, planned, name)]
    return summarise(run, planned, name), phases, run


def main() -> None:
    """Run each model, then print the tables."""
    usual: dict[str, Any] = {"model": ["0.6b", "1.7b", "4b"], "limit": 4 * RUN_TIMEOUT}
    parser = benchmark_parser(__doc__ or "", "defaults", steps=5, **usual)
    parser.add_argument("--devices", type=int, default=1, help="GPUs of a run (1)")
    parser.add_argument("--prompts", type=int, help="a step (the README's on each device)")
    parser.add_argument("--max-new-tokens", type=int, help="(the README's)")
    arguments = parser.parse_args()
    arguments.deadline, arguments.notes = time.monotonic() + arguments.limit, []
    sys.path[:0] = [str(BENCHMARKS.parent)]
    os.environ["HF_HUB_OFFLINE"] = "1"
    arguments.out.mkdir(parents=True, exist_ok=True)
    runs, phases = (
        KeptRows(arguments.out, "model", "devices"),
        KeptRows(arguments.out / "phases", "model", "devices", "phase"),
    )
    for name, named, seconds in models_in_time(arguments, 0.0):
        row, peaks, run = measure(named, name, seconds)
        runs.put(row)
        say(format_table([row]))
        for peak in peaks:
            phases.put(peak)
        if run.exit_code:
            arguments.notes.append(f"{name} ended early: {run.end} The plan: {read_plan(named, run)}")
    finish(arguments, runs.rows, [format_table(phases.rows), *arguments.notes])


if __name__ == "__main__":
    main()
