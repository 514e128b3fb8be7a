"""Line and bar charts as inline SVG, without scripts; colours come from the page's style sheet."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from statistics import fmean

from rlightning.report.history import Points

WIDTH, HEIGHT = 480, 270
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 32, 42
MAX_HOVERS = 150
"""Maximum number of columns that respond to the pointer; more would make the page large, and columns too thin."""
MAX_BARS = 80


class Axes:
    """The axes of a chart of ``width`` x ``HEIGHT`` pixels, which map steps and values to pixels."""

    def __init__(self, steps: tuple[float, float], values: tuple[float, float], width: int) -> None:
        self.width = width
        self.y_ticks = nice_ticks(*values, num=5)
        self.x_ticks = [tick for tick in nice_ticks(*steps, num=6) if steps[0] <= tick <= steps[1] and tick % 1 == 0]
        self.low, self.high = min(values[0], self.y_ticks[0]), max(values[1], self.y_ticks[-1])
        self.first, self.last = steps

    def x(self, step: float) -> float:
        """Return a rollout step's distance from the chart's left edge, in pixels."""
        share = (step - self.first) / (self.last - self.first) if self.last > self.first else 0.5
        return LEFT + share * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Return a value's distance from the chart's top edge, in pixels."""
        return TOP + (self.high - value) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)

    def draw(self, y_label: str) -> str:
        """Return the SVG of grid lines, ticks and labels."""
        parts = []
        for tick in self.y_ticks:
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{self.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>')
        for tick in self.x_ticks:
            parts.append(
                f'<text class="tick" x="{self.x(tick):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
                f"{tick:,.0f}</text>"
            )
        parts.append(
            f'<text class="label" x="{self.width - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">rollout step</text>'
            f'<text class="label" x="0" y="14">{escape(y_label)}</text>'
        )
        return "".join(parts)


def line_chart(title: str, y_label: str, series: Mapping[str, Points], *, from_zero: bool = False) -> str:
    """Return an SVG line chart of one or more metrics over rollout steps.

    A single noisy line is drawn thin, with its running mean on top.

    Args:
        y_label: the quantity with its unit.
        series: points by label; none may be empty.
        from_zero: whether the axis begins at zero.
    """
    values = [value for points in series.values() for _, value in points]
    steps = [step for points in series.values() for step, _ in points]
    low = min(0.0, *values) if from_zero else min(values)
    axes = Axes((min(steps), max(steps)), (low, max(values)), WIDTH)
    window = _smoothing(next(iter(series.values()))) if len(series) == 1 else 1
    marks = []
    for i, points in enumerate(series.values(), 1):
        marks.append(_polyline(points, axes, f"s{i}" + (" raw" if window > 1 else "")))
        if window > 1:
            marks.append(_polyline(running_mean(points, window), axes, f"s{i}"))
        if len(points) <= 12:
            marks += [f'<circle class="dot s{i}" cx="{axes.x(s):.1f}" cy="{axes.y(v):.1f}" r="3"/>' for s, v in points]
    note = f"thick: mean of {window} steps" if window > 1 else ""
    legend = _legend(list(series) if len(series) > 1 else [], note)
    return _figure(title, axes.draw(y_label) + "".join(marks) + _line_hovers(series, axes), legend, axes.width)


def stacked_chart(title: str, y_label: str, series: Mapping[str, Points]) -> str:
    """Return the SVG of wide stacked bars over rollout steps; above ``MAX_BARS``, neighbouring steps are averaged.

    Args:
        y_label: the quantity with its unit.
        series: points by label, from the bottom up; missing steps count as zero.
    """
    by_label = {label: dict(points) for label, points in series.items()}
    steps = sorted({step for points in by_label.values() for step in points})
    size = math.ceil(len(steps) / MAX_BARS)
    bins = [steps[i : i + size] for i in range(0, len(steps), size)]
    stacks = [{label: fmean(points.get(s, 0.0) for s in bin_) for label, points in by_label.items()} for bin_ in bins]
    axes = Axes((steps[0] - 0.5, steps[-1] + 0.5), (0.0, max(sum(stack.values()) for stack in stacks)), 2 * WIDTH)
    bars = [_bar(bin_, stack, axes) for bin_, stack in zip(bins, stacks, strict=True)]
    note = f"a bar is the mean of {size} steps" if size > 1 else ""
    return _figure(title, axes.draw(y_label) + "".join(bars), _legend(list(series), note), axes.width)


def _bar(steps: Sequence[int], stack: Mapping[str, float], axes: Axes) -> str:
    left, right = axes.x(steps[0] - 0.5), axes.x(steps[-1] + 0.5)
    # Bars of a run of a few steps are not wider than this.
    gap = max((right - left) * 0.12, (right - left - 40) / 2)
    shape, bottom = "", 0.0
    for i, value in enumerate(stack.values(), 1):
        y, height = axes.y(bottom + value), axes.y(bottom) - axes.y(bottom + value)
        shape += (
            f'<rect class="fill s{i}" x="{left + gap:.1f}" y="{y:.1f}" width="{right - left - 2 * gap:.1f}" '
            f'height="{height:.1f}"/>'
        )
        bottom += value
    name = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    lines = [name, *(f"{label}: {number(value)}" for label, value in stack.items())]
    return f'<g class="hover">{shape}<title>{escape(chr(10).join(lines))}</title></g>'


def _smoothing(points: Points) -> int:
    """Return the window of the running mean: 1 for a smooth or short line, more for one that oscillates."""
    window = len(points) // 20
    if window < 2:
        return 1
    smooth = running_mean(points, window)
    way, smooth_way = (sum(abs(b - a) for (_, a), (_, b) in pairwise(line)) for line in (points, smooth))
    return window if way > 2 * smooth_way else 1


def _polyline(points: Points, axes: Axes, classes: str) -> str:
    path = " ".join(f"{axes.x(step):.1f},{axes.y(value):.1f}" for step, value in points)
    return f'<polyline class="line {classes}" points="{path}"/>'


def _line_hovers(series: Mapping[str, Points], axes: Axes) -> str:
    """Return invisible columns, one for each step, that show the values under the pointer."""
    by_label = [(label, dict(points)) for label, points in series.items()]
    steps = sorted({step for _, points in by_label for step in points})
    steps = steps[:: math.ceil(len(steps) / MAX_HOVERS)]
    edges = [axes.x((a + b) / 2) for a, b in pairwise(steps)]
    parts = []
    for step, left, right in zip(steps, [LEFT, *edges], [*edges, axes.width - RIGHT], strict=True):
        here = [(i, label, points[step]) for i, (label, points) in enumerate(by_label, 1) if step in points]
        text = "\n".join([f"step {step}", *(f"{label}: {number(value)}" for _, label, value in here)])
        dots = "".join(f'<circle class="s{i}" cx="{axes.x(step):.1f}" cy="{axes.y(v):.1f}" r="4"/>' for i, _, v in here)
        parts.append(
            f'<g class="hover"><rect class="hit" x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" '
            f'height="{HEIGHT - TOP - BOTTOM}"/>{dots}<title>{escape(text)}</title></g>'
        )
    return "".join(parts)


def _legend(labels: Sequence[str], note: str) -> str:
    items = [f'<span class="key s{i}">{escape(label)}</span>' for i, label in enumerate(labels, 1)]
    if note:
        items.append(f'<span class="note">{note}</span>')
    return f'<div class="legend">{"".join(items)}</div>' if items else ""


def _figure(title: str, content: str, legend: str, width: int) -> str:
    return (
        f"<figure{' class=wide' if width > WIDTH else ''}><figcaption>{escape(title)}</figcaption>{legend}"
        f'<div class="plot"><svg viewBox="0 0 {width} {HEIGHT}" role="img" aria-label="{escape(title)}">{content}</svg>'
        "</div></figure>"
    )


def nice_ticks(low: float, high: float, *, num: int) -> list[float]:
    """Return about ``num`` round numbers (1, 2 or 5 times a power of ten apart) that enclose ``low`` to ``high``."""
    if high - low < 1e-12 * max(abs(low), abs(high), 1e-12):
        low, high = (0.0, 1.0) if high == 0 else sorted((0.0, 2.0 * high))
    rough = (high - low) / max(num - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    spacing = next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= rough * 0.999)
    first, last = math.floor(low / spacing + 1e-9), math.ceil(high / spacing - 1e-9)
    return [round(i * spacing, 12) for i in range(first, last + 1)]


def running_mean(points: Points, window: int) -> Points:
    """Return each value averaged with the values up to half a window before and after it."""
    half = window // 2
    values = [value for _, value in points]
    return [(step, fmean(values[max(i - half, 0) : i + half + 1])) for i, (step, _) in enumerate(points)]


def number(value: float) -> str:
    """Format a number with three significant digits; very small and very large ones in powers of ten."""
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-3 or size >= 1e7:
        return f"{value:.2g}"
    if size >= 100:
        return f"{value:,.0f}"
    return f"{float(f'{value:.3g}'):g}"
