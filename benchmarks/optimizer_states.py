"""What AdamW's moments in fewer bytes cost in learning: losses of the arithmetic task, by `optimizer_states`.

    python benchmarks/optimizer_states.py --device cpu --seeds 0 1 2

Trains configs/arithmetic_sft.yaml with each setting and each seed, which decides the order of the data. The loss is the
mean over the last tenth of the steps. Runs of one seed see the same data: they are compared with float32's one by one.
"""

from pathlib import Path
from statistics import mean
from typing import Any

import yaml
from launch import Job, Run, benchmark_parser, finish, run_jobs
from learning_curves import ROOT, make_task

STATES = ("float32", "bfloat16", "8bit")


def make_job(task: Path, device: str, steps: int, states: str, seed: int) -> Job:
    """One run of supervised fine-tuning."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "arithmetic_sft.yaml").read_text())
    config["seed_everything"] = config["data"]["seed"] = seed
    config["data"]["train"] = str(task / "sft.jsonl")
    config["model"]["init_args"] |= {"model": str(task / "model"), "optimizer_states": states}
    config["trainer"] |= {
        "accelerator": "gpu" if device == "cuda" else "cpu",
        "max_steps": steps,
        "enable_checkpointing": False,
        "callbacks": [],
    }
    return Job(f"{states}_seed_{seed}", config)


def final_loss(run: Run) -> float:
    """The mean over the last tenth of the steps."""
    losses = [row["policy/loss"] for row in run.require_success().metrics()]
    return mean(losses[-max(len(losses) // 10, 1) :])


def main() -> None:
    """All settings with all seeds."""
    parser = benchmark_parser(__doc__ or "", "optimizer_states", steps=600, model=None)
    parser.add_argument("--states", nargs="+", choices=STATES, default=STATES, help=f"({' '.join(STATES)})")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(0 1 2)")
    arguments = parser.parse_args()
    task = make_task(arguments.out)
    runs = [(states, seed) for states in arguments.states for seed in arguments.seeds]
    jobs = [make_job(task, arguments.device, arguments.steps, *run) for run in runs]
    losses = dict(zip(runs, map(final_loss, run_jobs(jobs, arguments)), strict=True))
    rows = []
    for states in arguments.states:
        own = [losses[states, seed] for seed in arguments.seeds]
        row = {"optimizer_states": states, "loss": f"{mean(own):.4f}", "by seed": ", ".join(f"{x:.4f}" for x in own)}
        if "float32" in arguments.states:
            apart = (losses[states, seed] - losses["float32", seed] for seed in arguments.seeds)
            row["less float32's, by seed"] = ", ".join(f"{x:+.4f}" for x in apart)
        rows.append(row)
    finish(arguments, rows)


if __name__ == "__main__":
    main()
