"""What the benchmarks share: their arguments, runs in processes of their own, the runs' metrics, and tables."""

import argparse
import contextlib
import csv
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from threading import Condition
from typing import Any

import psutil
import yaml
from make_model import SHAPES, is_made

BENCHMARKS = Path(__file__).parent
PROMPT_TOKENS = 128
RUN_TIMEOUT = 900.0
"""Seconds that one run may take."""
END_SECONDS = 15.0
"""Between SIGTERM to a run that takes too long and SIGKILL to all of its processes."""
MOST_OF_AN_END = 300
"""Characters of a table's cell that says how a run failed: PyTorch's line on a full device has the facts in them."""

TORCHRUN_REPORT = re.compile(r"^[WE]\d{4} .* torch/distributed/elastic/", re.MULTILINE)
"""Begins what torchrun says of ranks that have failed, behind what these say."""

GIB = 2**30
PHASES = ("generate", "reward", "update", "sync")
"""Of a step, as its metrics time them."""
WORK = {
    "prompts": "a step",
    "samples": "completions of each",
    "max_new_tokens": "of the longest completion",
    "microbatch_tokens": "max_tokens_per_microbatch",
    "utilization": "gpu_memory_utilization",
    "warm_up": "steps that do not count",
    "limit": "seconds of all",
}
"""What several benchmarks let choose, by the names of the arguments."""

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Job:
    """One ``rlightning fit``.

    Attributes:
        name: of its folder.
        config: the YAML file's content.
        num_devices: GPUs that it takes, or ranks on a CPU.
    """

    name: str
    config: dict[str, Any]
    num_devices: int = 1


@dataclass(frozen=True)
class Run:
    """A job that has ended.

    Attributes:
        job: what was run.
        folder: the run's folder.
        exit_code: 0 if it ended well.
        seconds: that it took, start and end included.
    """

    job: Job
    folder: Path
    exit_code: int
    seconds: float

    def read_log(self) -> str:
        """What the run and its engines said."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log")))

    def metrics(self) -> list[dict[str, float]]:
        """The metrics of each training step, those of validation left out."""
        return [row for row in self.all_metrics() if "time/step" in row]

    def all_metrics(self) -> list[dict[str, float]]:
        """The rows of the run's CSV file, without their empty fields."""
        files = sorted(self.folder.glob("metrics/version_*/metrics.csv"))
        with open(files[-1] if files else os.devnull, newline="") as file:
            return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]

    def read_trace(self, name: str, rank: int = 0) -> list[dict[str, str]]:
        """The rows that a callback of probes.py wrote; none if it never came to it."""
        path = self.folder / f"{name}-{rank}.csv"
        if not path.exists():
            return []
        with path.open(newline="") as file:
            return list(csv.DictReader(file))

    @property
    def end(self) -> str:
        """How it ended: "ok", or why early.

        Of a full device, what PyTorch, CUDA or NCCL says: which one it is, and what this process and others have of it.
        """
        if self.exit_code == 0:
            return "ok"
        if self.exit_code == 124:
            return "too slow"
        log = TORCHRUN_REPORT.split(self.read_log(), maxsplit=1)[0]
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        told = [line for line in lines if line.startswith("error: ")]  # behind it, libraries may say more
        short = [line for line in (*told, *lines) if "out of memory" in line or "OutOfMemoryError" in line]
        last = (told or lines or [""])[-1]
        end = f"out of memory: {short[0]}" if short else f"exit code {self.exit_code}: {last}"
        return end[:MOST_OF_AN_END].replace("|", "/")

    def require_success(self) -> "Run":
        """This run; if it failed, the benchmark ends with the end of its log."""
        if self.exit_code:
            lines = (self.folder / "run.log").read_text(errors="replace").splitlines()[-40:]
            raise SystemExit("\n".join([*lines, "", f"{self.job.name} ended with exit code {self.exit_code}."]))
        return self


def benchmark_parser(
    description: str, name: str, *, steps: int, model: str | list[str] | None = "0.6b", **work: Any
) -> argparse.ArgumentParser:
    """A parser with the arguments that all benchmarks have.

    Args:
        description: the script's docstring.
        name: the benchmark's, of its output folder.
        steps: the usual number of rollout steps of a run.
        model: the usual one, or the usual ones where there may be several; None where there is no choice.
        work: the usual values of arguments of :data:`WORK`, those that may be several as lists.
    """
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="What follows a lone -- goes to each `rlightning fit`, such as: -- --rollout.engine.enforce_eager true",
    )
    if model is not None:
        known = f"{', '.join(SHAPES)}, or a Hugging Face folder"
        _add(parser, "--model", model, known)
        parser.add_argument("--models", type=Path, default=Path("runs/models"), help="gets made shapes (runs/models)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--steps", type=int, default=steps, help=f"rollout steps of a run ({steps})")
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time, each on GPUs of its own (1)")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks") / name, help="gets tables, runs and logs")
    for argument, value in work.items():
        _add(parser, f"--{argument.replace('_', '-')}", value, WORK[argument])
    parser.add_argument("options", nargs="*", help=argparse.SUPPRESS)
    return parser


def _add(parser: argparse.ArgumentParser, name: str, usual: Any, meaning: str) -> None:
    several = isinstance(usual, list)
    kind, shown = (type(usual[0]), " ".join(map(str, usual))) if several else (type(usual), usual)
    parser.add_argument(name, type=kind, nargs="+" if several else None, default=usual, help=f"{meaning} ({shown})")


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments, of which warm-up leaves some steps."""
    arguments = parser.parse_args()
    if arguments.steps <= arguments.warm_up:
        parser.error(f"--steps {arguments.steps} leaves none after --warm-up {arguments.warm_up}")
    return arguments


def prepare(arguments: argparse.Namespace) -> None:
    """Make the model, where a shape was named, and the output folder."""
    if arguments.model in SHAPES:
        shape, folder = arguments.model, arguments.models / arguments.model
        if not is_made(folder):  # in a process of its own: one that has used the GPU keeps some of its memory
            subprocess.run([sys.executable, str(BENCHMARKS / "make_model.py"), shape, str(folder)], check=True)
        arguments.model = str(folder)
    arguments.out.mkdir(parents=True, exist_ok=True)


def models_in_time(arguments: argparse.Namespace, least: float) -> Iterator[tuple[str, argparse.Namespace, float]]:
    """Each of ``--model``, made.

    Args:
        arguments: with a time in seconds of `time.monotonic` as ``deadline``, and a list as ``notes``, which gets the
            names of those for which no time is left.
        least: seconds that a run needs.

    Yields:
        Its name, the arguments with its folder, and the seconds that its run may take.
    """
    for model in arguments.model:
        name, left = Path(model).name, arguments.deadline - time.monotonic()
        if left <= least:
            arguments.notes.append(f"Left out, as --limit was over: {name}.")
            continue
        named = argparse.Namespace(**vars(arguments) | {"model": model})
        prepare(named)
        yield name, named, min(left, RUN_TIMEOUT)


def write_prompts(path: Path, count: int, num_tokens: int = PROMPT_TOKENS) -> str:
    """Prompts of letters, a token each under the tokenizer of make_model.py; the file's name."""
    letters = random.Random(0)
    rows = ({"prompt": "".join(letters.choices("abcdefgh ", k=num_tokens))} for _ in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def grpo_config(
    arguments: argparse.Namespace,
    *,
    prompts_per_step: int,
    samples_per_prompt: int,
    num_devices: int = 1,
    model: dict[str, Any] | None = None,
    rollout: dict[str, Any] | None = None,
    callbacks: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """A GRPO run on random prompts with random rewards, without validation and checkpoints.

    Args:
        arguments: of :func:`benchmark_parser`, after :func:`prepare`.
        prompts_per_step: over all ranks.
        samples_per_prompt: of each.
        num_devices: ranks; the actor is sharded over more than one.
        model: further arguments of GRPO.
        rollout: the engine's section.
        callbacks: in their order.
    """
    is_cuda = arguments.device == "cuda"
    prompts = arguments.out / "prompts.jsonl"
    if not prompts.is_file():
        write_prompts(prompts, 4096)
    trainer: dict[str, Any] = {
        "accelerator": "gpu" if is_cuda else "cpu",
        "devices": num_devices,
        "precision": "bf16-mixed" if is_cuda else "32-true",
        "max_steps": arguments.steps,
        "max_epochs": -1,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "callbacks": list(callbacks),
    }
    if num_devices > 1:
        trainer["strategy"] = {"class_path": "rlightning.parallel.FSDP"}
    settings = {
        "model": str(arguments.model),
        "rewards": ["rewards.random_reward"],
        "prompts_per_step": prompts_per_step,
        "samples_per_prompt": samples_per_prompt,
    }
    return {
        "model": {"class_path": "GRPO", "init_args": settings | (model or {})},
        "rollout": rollout or {},
        "data": {"train": str(prompts), "max_prompt_tokens": PROMPT_TOKENS},
        "trainer": trainer,
    }


def callback(path: str, **arguments: Any) -> dict[str, Any]:
    """A callback as YAML has it; one of the package's by its bare name."""
    path = path if "." in path else f"rlightning.callbacks.{path}"
    return {"class_path": path, "init_args": arguments}


def run_jobs(
    jobs: Sequence[Job], arguments: argparse.Namespace, *, runs_per_device: int = 1, deadline: float = math.inf
) -> Iterator[Run]:
    """Run each job as soon as there are devices for it; in their order, at most ``--at-once`` at a time.

    Args:
        jobs: what to run.
        arguments: of :func:`benchmark_parser`.
        runs_per_device: that may share one.
        deadline: of `time.monotonic`, at which runs are stopped, and after which none is started.

    Yields:
        The runs in the jobs' order, each when it has ended, well or not.
    """
    needed = max((job.num_devices for job in jobs), default=0)
    num_devices = count_gpus() if arguments.device == "cuda" else needed * arguments.at_once
    if needed > num_devices:
        raise SystemExit(f"{needed} GPUs are needed, and there are {num_devices}.")
    room = dict.fromkeys(range(num_devices), runs_per_device)
    changed = Condition()

    def run(job: Job) -> Run | None:
        with changed:
            changed.wait_for(lambda: sum(places > 0 for places in room.values()) >= job.num_devices)
            devices = sorted(room, key=lambda device: -room[device])[: job.num_devices]
            for device in devices:
                room[device] -= 1
        try:
            left = deadline - time.monotonic()
            return fit(job, arguments, sorted(devices), timeout=min(left, RUN_TIMEOUT)) if left > 0 else None
        finally:
            with changed:
                for device in devices:
                    room[device] += 1
                changed.notify_all()

    with ThreadPoolExecutor(arguments.at_once) as pool:
        yield from filter(None, pool.map(run, jobs))


def count_gpus() -> int:
    """GPUs of this machine that may be used, counted without using one."""
    import torch  # `--help` does without it

    return torch.cuda.device_count()


def fit(job: Job, arguments: argparse.Namespace, devices: Sequence[int], *, timeout: float = RUN_TIMEOUT) -> Run:
    """Run a job in a folder of its own below ``--out``, on the given devices, for so many seconds at most.

    torchrun starts ranks, all of them at once. Lightning starts the others when rank 0 has imported everything, so that
    a run begins half a minute later.
    """
    folder, options = write_run(arguments, job)
    trainer = job.config["trainer"]
    num_ranks = 1 if "RayController" in str(trainer.get("strategy")) else trainer.get("devices", 1)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [sys.executable, *(torchrun if num_ranks > 1 else []), "-m", "rlightning", *options]
    environment = program_environment()
    if arguments.device == "cuda":
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible[i] if visible else str(i) for i in devices)
    begun = time.perf_counter()
    exit_code = run_logged(command, folder / "run.log", environment, timeout)
    return Run(job, folder, exit_code, time.perf_counter() - begun)


def program_environment() -> dict[str, str]:
    """The variables of ``rlightning``: it finds this checkout and the benchmarks' callbacks, and asks no hub."""
    paths = [str(BENCHMARKS), str(BENCHMARKS.parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}


def run_logged(command: Sequence[str], log: Path, environment: dict[str, str], timeout: float) -> int:
    """Run a command, whose output the log gets; its exit code, 124 if it took more than so many seconds.

    All processes that it has started end with it: ranks would wait for rank 0 for half an hour, and keep their GPUs.
    """
    with log.open("w") as file:
        process = psutil.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        started: list[psutil.Process] = []
        try:
            return int(process.wait(timeout))
        except psutil.TimeoutExpired:
            started = process.children(recursive=True)  # torchrun's ranks have sessions of their own
            process.terminate()
            with contextlib.suppress(psutil.TimeoutExpired):
                process.wait(END_SECONDS)
            return 124
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for one in started:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            process.wait()


def write_run(arguments: argparse.Namespace, job: Job) -> tuple[Path, list[str]]:
    """Make a job's folder below ``--out``, with its YAML file; the folder, and what to call `rlightning` with."""
    folder: Path = arguments.out / job.name
    if (folder / "run.yaml").is_file():
        shutil.rmtree(folder)  # of an earlier try
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(job.config, sort_keys=False))
    options = ["--config", str(folder / "run.yaml"), "--trainer.default_root_dir", str(folder)]
    return folder, ["fit", *options, *arguments.options]


def say(text: str) -> None:
    """Write to standard output at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def write_csv(path: Path, rows: Rows) -> None:
    """Write rows of equal keys; an empty file without any."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def format_table(rows: Rows) -> str:
    """Rows of equal keys as a Markdown table; floats with three digits. Nothing without any rows."""
    if not rows:
        return ""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([_format(value) for value in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


class KeptRows:
    """Rows that are on disk as soon as they are there; a later call with the same ``--out`` has them too.

    Args:
        folder: of the benchmark's output; gets ``rows.json``.
        keys: the columns that tell rows apart: a new row replaces the one that has the same values in them.
    """

    def __init__(self, folder: Path, *keys: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.keys = folder / "rows.json", keys
        self.rows: Rows = json.loads(self.path.read_text()) if self.path.is_file() else []

    def put(self, row: dict[str, Any]) -> None:
        """Add a row, or replace one."""
        mine = [row[key] for key in self.keys]
        self.rows = [old for old in self.rows if [old[key] for key in self.keys] != mine]
        self.rows.append(row)
        self.path.write_text(json.dumps(self.rows))


def middle(values: Iterable[float]) -> float | None:
    """The median; None of nothing."""
    found = list(values)
    return median(found) if found else None


def finish(arguments: argparse.Namespace, rows: Rows, notes: Iterable[str] = ()) -> None:
    """Write the benchmark's table to ``--out``, as Markdown and CSV, and print it, and then the notes."""
    text = "\n".join([format_table(rows), *notes])
    (arguments.out / "table.md").write_text(text + "\n")
    write_csv(arguments.out / "table.csv", rows)
    say(text)


def _format(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)
