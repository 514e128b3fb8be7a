"""Loss and reward curves of the arithmetic task on one GPU and on several: do they agree within the seeds' spread?

    python benchmarks/learning_curves.py --gpus 4 --seeds 0 1 2 3

Trains configs/arithmetic_sft.yaml and then configs/arithmetic_grpo.yaml, with each seed on one GPU and on --gpus GPUs
(FSDP, an engine a rank). The task is the same for all, and all GRPO runs start from the one-GPU SFT model of the first
seed, so that seeds differ in the order of the data and in what is sampled, and in nothing else. The runs are small:
several share a GPU.

The rule, fixed before the runs: a quantity agrees if its means on one and on several GPUs differ by less than twice the
standard error of that difference, sqrt(s1^2 / n1 + s2^2 / n2), over the seeds. The quantities: SFT's loss over its last
tenth, GRPO's reward averaged over all steps, greedy pass@1 at the end. The points of the curves are shown with the same
bound.

Writes --out/table.md, table.csv (by step), agreement.md, loss.svg, reward.svg and pass.svg.
"""

import argparse
import math
import subprocess
import sys
from pathlib import Path
from statistics import mean, variance
from typing import Any

import yaml
from draw import Line, draw
from launch import Job, Rows, Run, benchmark_parser, format_table, run_jobs, say, write_csv

ROOT = Path(__file__).parent.parent
PASS = "val/heldout/pass@1"
NUM_POINTS = 10
"""Points of a curve in the table: each is the mean over a tenth of the steps, but for validations."""

Curve = list[tuple[int, float]]


def curve_parser(
    description: str, name: str, *, steps: int, seeds: list[int], runs_per_gpu: int, at_once: int
) -> argparse.ArgumentParser:
    """The arguments of all benchmarks that train the arithmetic task, with their usual values."""
    parser = benchmark_parser(description, name, steps=steps, model=None, utilization=0.06)
    parser.add_argument("--seeds", type=int, nargs="+", default=seeds, help=f"({' '.join(map(str, seeds))})")
    parser.add_argument("--sft-steps", type=int, default=600, help="of stage one (600)")
    parser.add_argument("--start", type=Path, help="a model of stage one, which is left out then")
    parser.add_argument("--runs-per-gpu", type=int, default=runs_per_gpu, help=f"that share a GPU ({runs_per_gpu})")
    parser.set_defaults(at_once=at_once)
    return parser


def make_task(out: Path) -> Path:
    """Make the task's rows and its untrained model in a folder of ``out``; the folder."""
    subprocess.run([sys.executable, str(ROOT / "examples/arithmetic/make_task.py"), str(out / "task")], check=True)
    return out / "task"


def train_start(arguments: argparse.Namespace) -> Path:
    """The model of stage one: ``--start``, or one that is trained with the first seed."""
    if arguments.start is not None:
        return Path(arguments.start)
    [trained] = run_jobs([sft_job(arguments, arguments.seeds[0], 1)], arguments)
    return trained.require_success().folder / "hf"


def load_config(arguments: argparse.Namespace, stage: str, seed: int, num_gpus: int) -> dict[str, Any]:
    """configs/arithmetic_<stage>.yaml with other paths, devices and seed."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "configs" / f"arithmetic_{stage}.yaml").read_text())
    task = arguments.out / "task"
    config["seed_everything"] = config["data"]["seed"] = seed
    config["data"]["train"] = str(task / ("sft.jsonl" if stage == "sft" else "train.jsonl"))
    config["model"]["init_args"]["model"] = str(task / "model")
    trainer = config["trainer"]
    trainer |= {
        "accelerator": "gpu" if arguments.device == "cuda" else "cpu",
        "devices": num_gpus,
        "max_steps": arguments.sft_steps if stage == "sft" else arguments.steps,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    if num_gpus > 1:
        trainer["strategy"] = {"class_path": "rlightning.parallel.FSDP"}
    return config


def sft_job(arguments: argparse.Namespace, seed: int, num_gpus: int) -> Job:
    """Stage one of one seed."""
    return Job(f"sft_{num_gpus}_gpus_seed_{seed}", load_config(arguments, "sft", seed, num_gpus), num_gpus)


def grpo_job(arguments: argparse.Namespace, seed: int, num_gpus: int, model: Path) -> Job:
    """Stage two of one seed, from the model of stage one."""
    config = load_config(arguments, "grpo", seed, num_gpus)
    config["model"]["init_args"]["model"] = str(model)
    config["data"]["validation"]["heldout"]["path"] = str(arguments.out / "task" / "heldout.jsonl")
    config["rollout"]["dtype"] = "float32"
    config["trainer"]["val_check_interval"] = max(config["trainer"]["max_steps"] // NUM_POINTS, 1)
    config["trainer"].pop("callbacks", None)  # the models are not needed any more
    if arguments.device == "cuda":
        config["rollout"] |= {
            "gpu_memory_utilization": arguments.utilization,
            "sleep": False,
            # Engines that start beside each other must not size themselves by what is free at the moment.
            "engine": {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 30},
        }
    return Job(f"grpo_{num_gpus}_gpus_seed_{seed}", config, num_gpus)


def read_curve(run: Run, metric: str) -> Curve:
    """Rollout step and value of each row that has the metric."""
    return [(int(row["step"]), row[metric]) for row in run.all_metrics() if metric in row]


def thin(curve: Curve) -> Curve:
    """At most :data:`NUM_POINTS` points (and a first one), each the mean of those since the one before."""
    size = max(len(curve) // NUM_POINTS, 1)
    if size == 1:
        return curve
    parts = [curve[i : i + size] for i in range(0, len(curve), size)]
    return [(part[-1][0], mean(value for _, value in part)) for part in parts]


def compare(one: list[float], several: list[float]) -> dict[str, Any]:
    """Means, ranges, and the difference beside twice its standard error; None with a single seed."""
    bound = None
    if min(len(one), len(several)) > 1:
        bound = 2 * math.sqrt(variance(one) / len(one) + variance(several) / len(several))
    difference = mean(several) - mean(one)
    return {
        "1 GPU": mean(one),
        "1 GPU, range": f"{min(one):.3f} to {max(one):.3f}",
        "several": mean(several),
        "several, range": f"{min(several):.3f} to {max(several):.3f}",
        "difference": difference,
        "2 standard errors": bound,
        "agree": "-" if bound is None else "yes" if abs(difference) <= bound else "no",
    }


def compare_curves(quantity: str, one: list[Curve], several: list[Curve]) -> Rows:
    """A row a point of the thinned curves."""
    rows: Rows = []
    thinned = [[thin(curve) for curve in curves] for curves in (one, several)]
    for points in zip(*thinned[0], *thinned[1], strict=True):
        values = [value for _, value in points]
        rows.append({"quantity": quantity, "step": points[0][0], **compare(values[: len(one)], values[len(one) :])})
    return rows


def compare_stage(
    arguments: argparse.Namespace, runs: list[Run], metric: str, file: str
) -> tuple[list[list[Curve]], Rows]:
    """The curves of one metric, drawn: those of one GPU, and those of several."""
    curves = [[read_curve(run, metric) for run in runs if (run.job.num_devices > 1) == many] for many in (False, True)]
    labels = ["1 GPU", f"{arguments.gpus} GPUs"]
    lines = [Line(thin(c), i, labels[i]) for i in (0, 1) for c in curves[i]]
    title = f"{metric}, {len(arguments.seeds)} seeds each"
    (arguments.out / file).write_text(draw(lines, title=title, x_label="step"))
    return curves, compare_curves(metric, *curves)


def compare_losses(arguments: argparse.Namespace, runs: list[Run]) -> tuple[Rows, Rows, list[str]]:
    """Of stage one: a row a point of the curves, a row on how they agree, and how far apart equal seeds ever are."""
    curves, rows = compare_stage(arguments, runs, "policy/loss", "loss.svg")
    last_tenth = [[mean(v for _, v in curve[-max(len(curve) // 10, 1) :]) for curve in some] for some in curves]
    pairs = [pair for both in zip(*curves, strict=True) for pair in zip(*both, strict=True)]
    apart = max(abs(one[1] - several[1]) for one, several in pairs)
    note = (
        f"SFT sees the same data on one and on {arguments.gpus} GPUs with the same seed: at no step do the two losses "
        f"differ by more than {apart:.2g} nats."
    )
    return rows, [{"quantity": "SFT loss, last tenth", **compare(*last_tenth)}], [note]


def main() -> None:
    """Both stages for all seeds, on one and on several GPUs."""
    usual: dict[str, Any] = {"steps": 250, "seeds": [0, 1, 2, 3], "runs_per_gpu": 5, "at_once": 8}
    parser = curve_parser(__doc__ or "", "learning_curves", **usual)
    parser.add_argument("--gpus", type=int, default=4, help="that one GPU is compared with (4)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    make_task(arguments.out)

    sizes = [1, arguments.gpus]
    share = arguments.runs_per_gpu
    jobs = [] if arguments.start else [sft_job(arguments, seed, n) for seed in arguments.seeds for n in sizes]
    sft = [run.require_success() for run in run_jobs(jobs, arguments, runs_per_device=share)]
    start = arguments.start or sft[0].folder / "hf"
    jobs = [grpo_job(arguments, seed, n, start) for n in reversed(sizes) for seed in arguments.seeds]
    grpo = [run.require_success() for run in run_jobs(jobs, arguments, runs_per_device=share)]

    rows, agreement, notes = compare_losses(arguments, sft) if sft else ([], [], [])
    reward, reward_rows = compare_stage(arguments, grpo, "reward/mean", "reward.svg")
    passed, pass_rows = compare_stage(arguments, grpo, PASS, "pass.svg")
    rows += reward_rows + pass_rows
    write_csv(arguments.out / "table.csv", rows)
    (arguments.out / "table.md").write_text(format_table(rows))

    area = [[mean(value for _, value in curve) for curve in curves] for curves in reward]
    last = [[curve[-1][1] for curve in curves] for curves in passed]
    agreement += [
        {"quantity": "GRPO reward, all steps", **compare(*area)},
        {"quantity": "greedy pass@1, end", **compare(*last)},
    ]
    text = "\n".join([format_table(agreement), *notes])
    (arguments.out / "agreement.md").write_text(text)
    say(text)


if __name__ == "__main__":
    main()
