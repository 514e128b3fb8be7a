"""Line charts as SVG, light and dark."""

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 680, 320, 56, 24, 52, 40
NUM_TICKS = 5
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #5c6370 }
.grid { stroke: #d5d9e0 } .line { fill: none; stroke-width: 1.8 }
.c0 { stroke: #3b5bdb } .c1 { stroke: #e8590c } .c2 { stroke: #2b8a3e } .c3 { stroke: #ae3ec9 }
@media (prefers-color-scheme: dark) { text { fill: #9aa2b1 } .grid { stroke: #2a2f38 } }
"""


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        points: x and y.
        color: 0 to 3.
        label: of its colour; lines of one colour share it.
    """

    points: Sequence[tuple[float, float]]
    color: int
    label: str


def draw(lines: Sequence[Line], *, title: str, x_label: str) -> str:
    """The lines as SVG, from 0 on both axes."""
    last = max((x for line in lines for x, _ in line.points), default=1) or 1
    top = max((y for line in lines for _, y in line.points), default=1) or 1

    def place(x: float, y: float) -> str:
        return f"{LEFT + x / last * (WIDTH - LEFT - RIGHT):.1f},{TOP + (1 - y / top) * (HEIGHT - TOP - BOTTOM):.1f}"

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"><style>{STYLE}</style>']
    parts.append(f'<text x="8" y="18">{title}</text>')
    for tick in range(NUM_TICKS + 1):
        value, (_, y) = top * tick / NUM_TICKS, place(0, top * tick / NUM_TICKS).split(",")
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{float(y) + 4:.1f}" text-anchor="end">{value:.3g}</text>')
        x, _ = place(last * tick / NUM_TICKS, 0).split(",")
        parts.append(
            f'<text x="{x}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{last * tick / NUM_TICKS:.3g}</text>'
        )
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{x_label}</text>')
    left = LEFT
    for color, label in dict.fromkeys((line.color, line.label) for line in lines):
        parts.append(f'<line class="line c{color}" x1="{left}" x2="{left + 18}" y1="36" y2="36"/>')
        parts.append(f'<text x="{left + 24}" y="40">{label}</text>')
        left += 44 + 7 * len(label)
    for line in lines:
        points = " ".join(place(x, y) for x, y in line.points)
        parts.append(f'<polyline class="line c{line.color}" points="{points}"/>')
    return "".join(parts) + "</svg>\n"
