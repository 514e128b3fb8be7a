"""What AdamW's moments in fewer bytes cost in learning: losses of the arithmetic task, by `optimizer_states`.

    python benchmarks/optimizer_states.py --device cpu --seeds 0 1 2

Trains configs/arithmetic_sft.yaml with each setting and each seed, which decides the order of the data. The loss is the
mean over the last tenth of the steps. Runs of one seed see the same data: they are compared with float32's one by one.
"""

import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any, get_args

import yaml
from launch import Job, Run, benchmark_parser, finish, run_jobs

from rlightning.optimizers import OptimizerStates
from rlightning.optimizers.moments import bytes_per_parameter

ROOT = Path(__file__).parent.parent
STATES: tuple[OptimizerStates, ...] = get_args(OptimizerStates)


def make_job(task: Path, device: str, steps: int, states: OptimizerStates, seed: int) -> Job:
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
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(0 1 2)")
    arguments = parser.parse_args()
    task = arguments.out / "task"
    subprocess.run([sys.executable, str(ROOT / "examples/arithmetic/make_task.py"), str(task)], check=True)
    jobs = [make_job(task, arguments.device, arguments.steps, s, seed) for s in STATES for seed in arguments.seeds]
    losses = [final_loss(run) for run in run_jobs(jobs, arguments)]
    by_states = {s: losses[i * len(arguments.seeds) :][: len(arguments.seeds)] for i, s in enumerate(STATES)}
    rows = []
    for states, own in by_states.items():
        apart = [one - usual for one, usual in zip(own, by_states["float32"], strict=True)]
        rows.append(
            {
                "optimizer_states": states,
                "bytes a parameter": bytes_per_parameter(states),
                "loss": f"{mean(own):.4f}",
                "by seed": ", ".join(f"{loss:.4f}" for loss in own),
                "less float32's, by seed": ", ".join(f"{difference:+.4f}" for difference in apart),
            }
        )
    finish(arguments, rows)


if __name__ == "__main__":
    main()
