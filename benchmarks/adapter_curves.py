"""Does an adapter learn what full training learns? GRPO of the arithmetic task, over ranks, learning rates and seeds.

    python benchmarks/adapter_curves.py --ranks 0 8 32 --lrs 2e-4 1e-3 2e-3 --seeds 0 1 2
    python benchmarks/adapter_curves.py --ranks 1 8 --lrs 1e-3 --start runs/arithmetic/sft/hf

Trains configs/arithmetic_sft.yaml once, and from that model configs/arithmetic_grpo.yaml with each seed: all weights
with the file's learning rate (rank 0), and an adapter of each further rank with each of --lrs. Float32, one GPU a run;
the runs are small, and several share a GPU. Nothing else differs between them.

A row a variant: the reward averaged over all steps and greedy pass@1 at the end, each as the mean over the seeds and
their range, and how far pass@1 is from full training's, in points, if rank 0 is among the ranks. The curves of full
training and of the best learning rate of each rank are drawn.

Writes --out/table.md, table.csv and pass.svg.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from draw import Line, draw
from launch import Job, Rows, Run, finish, run_jobs
from learning_curves import PASS, curve_parser, grpo_job, make_task, read_curve, thin, train_start


@dataclass(frozen=True)
class Variant:
    """What is trained; a rank of 0 is all weights, with the file's learning rate."""

    rank: int = 0
    lr: float | None = None

    def __str__(self) -> str:
        return f"rank {self.rank}" if self.rank else "all weights"

    def job(self, arguments: argparse.Namespace, seed: int, model: Path) -> Job:
        """Its run with one seed."""
        job = grpo_job(arguments, seed, 1, model)
        settings = job.config["model"]["init_args"]
        if self.rank:
            settings |= {"adapter": {"rank": self.rank}, "lr": self.lr}
        return Job(f"rank_{self.rank}_lr_{settings['lr']:g}_seed_{seed}", job.config)


def describe(variant: Variant, runs: list[Run], full: float | None) -> dict[str, Any]:
    """A variant's row; `full` is the pass@1 of full training."""
    rewards = [mean(value for _, value in read_curve(run, "reward/mean")) for run in runs]
    passed = [read_curve(run, PASS)[-1][1] for run in runs]
    return {
        "trained": str(variant),
        "lr": f"{runs[0].job.config['model']['init_args']['lr']:g}",
        "reward, all steps": mean(rewards),
        "range": f"{min(rewards):.3f} to {max(rewards):.3f}",
        "greedy pass@1, end": mean(passed),
        "its range": f"{min(passed):.3f} to {max(passed):.3f}",
        "points from full training": None if full is None else 100 * (mean(passed) - full),
    }


def draw_best(rows: Rows, curves: dict[Variant, list[Run]]) -> str:
    """pass@1 by step of full training and of each rank's best learning rate, a line a seed."""
    lines: list[Line] = []
    passed = {variant: row["greedy pass@1, end"] for variant, row in zip(curves, rows, strict=True)}
    for number, rank in enumerate(dict.fromkeys(variant.rank for variant in curves)):
        best = max((variant for variant in curves if variant.rank == rank), key=lambda variant: passed[variant])
        label = f"{best}, lr {best.lr:g}" if best.lr else str(best)
        lines += [Line(thin(read_curve(run, PASS)), number, label) for run in curves[best]]
    return draw(lines, title=f"{PASS}, best learning rate of each rank", x_label="step")


def main() -> None:
    """Stage one once, then every variant with every seed."""
    usual: dict[str, Any] = {"steps": 250, "seeds": [0, 1, 2], "runs_per_gpu": 6, "at_once": 12}
    parser = curve_parser(__doc__ or "", "adapter_curves", **usual)
    parser.add_argument("--ranks", type=int, nargs="+", default=[0, 8, 32], help="0: all weights (0 8 32)")
    parser.add_argument("--lrs", type=float, nargs="+", default=[2e-4, 1e-3, 2e-3], help="of adapters (2e-4 1e-3 2e-3)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    make_task(arguments.out)
    start = train_start(arguments)
    adapters = [Variant(rank, lr) for rank in arguments.ranks if rank for lr in arguments.lrs]
    variants = [Variant()] * (0 in arguments.ranks) + adapters
    jobs = [variant.job(arguments, seed, start) for variant in variants for seed in arguments.seeds]
    runs = [run.require_success() for run in run_jobs(jobs, arguments, runs_per_device=arguments.runs_per_gpu)]
    count = len(arguments.seeds)
    curves = {variant: runs[i * count : (i + 1) * count] for i, variant in enumerate(variants)}
    full = mean(read_curve(run, PASS)[-1][1] for run in curves[Variant()]) if Variant() in curves else None
    rows: Rows = [describe(variant, some, full) for variant, some in curves.items()]
    (arguments.out / "pass.svg").write_text(draw_best(rows, curves))
    finish(arguments, rows)


if __name__ == "__main__":
    main()
