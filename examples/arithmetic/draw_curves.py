"""Draws greedy pass@1 of one or more runs of a demo: draw_curves.py OUT.svg RUN_FOLDER [RUN_FOLDER ...]."""

import csv
import sys
from pathlib import Path

METRIC = "val/heldout/pass@1"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 300, 52, 60, 34, 40
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #5c6370 }
.grid { stroke: #d5d9e0 } .line { fill: none; stroke-width: 2.2 }
.c0 { stroke: #3b5bdb } .c1 { stroke: #e8590c } .c2 { stroke: #2b8a3e } .c3 { stroke: #ae3ec9 }
@media (prefers-color-scheme: dark) { text { fill: #9aa2b1 } .grid { stroke: #2a2f38 } }
"""

Curve = list[tuple[int, float]]


def read_curve(folder: Path) -> Curve:
    """Rollout step and pass@1 in percent of a run's validations."""
    metrics = max(folder.glob("metrics/version_*/metrics.csv"), key=lambda path: path.stat().st_mtime)
    with metrics.open(newline="") as file:
        return [(int(row["step"]), 100 * float(row[METRIC])) for row in csv.DictReader(file) if row.get(METRIC)]


def draw(curves: list[Curve]) -> str:
    """The curves as SVG, each with its last value at its end."""
    last_step = max(step for curve in curves for step, _ in curve)

    def x(step: float) -> float:
        return LEFT + step / last_step * (WIDTH - LEFT - RIGHT)

    def y(percent: float) -> float:
        return TOP + (100 - percent) / 100 * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"><style>{STYLE}</style>']
    parts.append('<text x="8" y="18">greedy pass@1 on held-out problems, %</text>')
    for percent in range(0, 101, 20):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(percent)}" y2="{y(percent)}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(percent) + 4}" text-anchor="end">{percent}</text>')
    for step in range(0, last_step + 1, max(last_step // 5, 1)):
        parts.append(f'<text x="{x(step)}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">rollout step</text>')
    for i, curve in enumerate(curves):
        points = " ".join(f"{x(step):.1f},{y(percent):.1f}" for step, percent in curve)
        end, reached = curve[-1]
        parts.append(f'<polyline class="line c{i % 4}" points="{points}"/>')
        parts.append(f'<text x="{x(end) + 6:.1f}" y="{y(reached) + 4:.1f}">{reached:.1f}</text>')
    return "".join(parts) + "</svg>\n"


def main() -> None:
    """Draw the runs named on the command line."""
    target, *folders = map(Path, sys.argv[1:])
    target.write_text(draw([read_curve(folder) for folder in folders]))


if __name__ == "__main__":
    main()
