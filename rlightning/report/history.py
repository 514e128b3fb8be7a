"""Metrics over rollout steps, in limited memory."""

import math
from collections.abc import Mapping
from typing import SupportsFloat

from rlightning.protocols import StateDict

Points = list[tuple[int, float]]


class History:
    """The values of every metric over rollout steps, thinned out in long runs.

    A series that reaches ``max_points`` is reduced to every other point, and then records only every other step, so
    that a run of any length has at most ``max_points`` evenly spaced points.

    Attributes:
        series: points (step, value) by metric name, in the order of steps; no value is NaN or infinite.
    """

    def __init__(self, max_points: int = 2000) -> None:
        self.max_points = max_points
        self.series: dict[str, Points] = {}
        self._strides: dict[str, int] = {}

    def add(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Add a step's metrics; if a resumed run repeats a step, the values from that step on are removed first."""
        for name, raw in metrics.items():
            value = float(raw)
            points = self.series.setdefault(name, [])
            while points and points[-1][0] >= step:
                points.pop()
            stride = self._strides.setdefault(name, 1)
            if not math.isfinite(value) or (points and step - points[-1][0] < stride):
                continue
            points.append((step, value))
            if len(points) >= self.max_points:
                self.series[name] = points[::2]
                self._strides[name] = 2 * max(stride, points[1][0] - points[0][0])

    def last(self, name: str) -> float | None:
        """Return the newest value of a metric; None if it has none."""
        points = self.series.get(name)
        return points[-1][1] if points else None

    def state_dict(self) -> StateDict:
        """Return the history as plain lists and dictionaries."""
        return {"series": {name: [list(p) for p in s] for name, s in self.series.items()}, "strides": self._strides}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.series = {name: [(int(s), float(v)) for s, v in points] for name, points in state["series"].items()}
        self._strides = dict(state["strides"])
