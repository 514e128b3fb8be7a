"""Does asynchronous GRPO learn the arithmetic task as on-policy GRPO does, and what does the correction do for it?

    python benchmarks/staleness.py --seeds 0 1 2 3

Trains configs/arithmetic_sft.yaml once and then, from its model, configs/arithmetic_grpo.yaml with a standalone engine:
at each max_staleness with the default correction, and at the largest one without any, all of them with each seed. The
runs are small: several share a GPU.

Writes --out/table.md and table.csv: greedy pass@1 on the held-out problems by step, the mean over the seeds; at the end
its difference from the first arm's, beside twice the standard error of that difference (learning_curves.py has the
rule); the mean age of what was trained on, and the oldest token.
"""

import argparse
from pathlib import Path
from statistics import mean
from typing import Any

from launch import Job, Run, finish, run_jobs
from learning_curves import PASS, compare, curve_parser, grpo_job, make_task, read_curve, train_start

TRAINER_AND_ENGINE = 2
"""GPUs of a run."""


def name_of(staleness: int, is_corrected: bool) -> str:
    """Of an arm."""
    return f"staleness_{staleness}{'' if is_corrected else '_uncorrected'}"


def arm_job(arguments: argparse.Namespace, staleness: int, is_corrected: bool, seed: int, start: Path) -> Job:
    """GRPO with one seed."""
    config = grpo_job(arguments, seed, 1, start).config
    config["trainer"]["val_check_interval"] = max(arguments.steps // 4, 1)
    config["rollout"] |= {"placement": "standalone", "max_staleness": staleness}
    if not is_corrected:
        config["model"]["init_args"]["rollout_correction"] = None
    return Job(f"{name_of(staleness, is_corrected)}_seed_{seed}", config, TRAINER_AND_ENGINE)


def summarise(staleness: int, is_corrected: bool, runs: list[Run], first: list[Run]) -> dict[str, Any]:
    """One line, of all seeds, compared with the first arm."""
    curves = [read_curve(run, PASS) for run in runs]
    compared = compare([read_curve(run, PASS)[-1][1] for run in first], [curve[-1][1] for curve in curves])
    ages = [row for run in runs for row in run.metrics() if "async/staleness_mean" in row]
    passed = {f"step {points[0][0]}": mean(value for _, value in points) for points in zip(*curves, strict=True)}
    return {
        "max_staleness": staleness,
        "correction": "none needed" if not staleness else "default" if is_corrected else "none",
        **passed,
        "range at the end": compared["several, range"],
        "difference": compared["difference"],
        "2 standard errors": compared["2 standard errors"],
        "staleness, mean": mean(row["async/staleness_mean"] for row in ages) if ages else 0.0,
        "staleness, max": max((row["async/staleness_max"] for row in ages), default=0.0),
        "requeued": sum(row.get("async/requeued", 0.0) for row in ages) / len(runs),
        "seeds": len(runs),
    }


def main() -> None:
    """Stage one, and all arms of stage two."""
    usual: dict[str, Any] = {"steps": 250, "seeds": [0, 1, 2, 3], "runs_per_gpu": 6, "at_once": 6}
    parser = curve_parser(__doc__ or "", "staleness", **usual)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4], help="(0 1 4)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    make_task(arguments.out)
    start = train_start(arguments)
    arms = [(staleness, True) for staleness in arguments.staleness] + [(max(arguments.staleness), False)]
    jobs = [arm_job(arguments, *arm, seed, start) for arm in arms for seed in arguments.seeds]
    runs = [run.require_success() for run in run_jobs(jobs, arguments, runs_per_device=arguments.runs_per_gpu)]
    by_arm = [runs[i : i + len(arguments.seeds)] for i in range(0, len(runs), len(arguments.seeds))]
    finish(arguments, [summarise(*arm, same, by_arm[0]) for arm, same in zip(arms, by_arm, strict=True)])


if __name__ == "__main__":
    main()
