"""Says what a run of a demo achieved: python examples/arithmetic/show_result.py FOLDER."""

import sys
from pathlib import Path

from draw_curves import read_curve

from rlightning.report.trajectories import read_completions


def main() -> None:
    """Write greedy pass@1 before and after, the way in between, and the last step's completions."""
    folder = Path(sys.argv[1])
    points = read_curve(folder)
    lines = ["", "Greedy pass@1 on held-out problems, by rollout step:"]
    lines += [f"  {step:4d} {score:5.1f}%  {'#' * round(score / 2)}" for step, score in points]
    lines += [f"From {points[0][1]:.1f}% to {points[-1][1]:.1f}%: {points[-1][1] - points[0][1]:+.1f} points.", ""]
    completions = read_completions(max((folder / "completions").glob("*.parquet")))
    lines += [f"  {row.prompt}{row.completion:<6} reward {row.reward:.0f}" for row in completions[::100]]
    lines += ["", f"Curves, phase times, configuration and completions: {folder / 'report.html'}", ""]
    sys.stdout.write("\n".join(lines))


if __name__ == "__main__":
    main()
