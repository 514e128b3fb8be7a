import re
from xml.etree import ElementTree

import pytest

from rlightning.report import charts
from rlightning.report.charts import line_chart, nice_ticks, number, running_mean, stacked_chart


def svg(chart: str) -> ElementTree.Element:
    found = re.search(r"<svg.*</svg>", chart, re.DOTALL)
    assert found is not None
    return ElementTree.fromstring(found[0])


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.0, [0.0, 0.5, 1.0]),
        (0.31, 0.86, [0.2, 0.4, 0.6, 0.8, 1.0]),
        (-0.03, 0.02, [-0.04, -0.02, 0.0, 0.02]),
        (0.0, 8123.0, [0.0, 5000.0, 10000.0]),
        (0.0, 0.0, [0.0, 0.5, 1.0]),
        (3.0, 3.0, [0.0, 2.0, 4.0, 6.0]),
        (-2.0, -2.0, [-4.0, -3.0, -2.0, -1.0, 0.0]),
    ],
)
def test_ticks_are_round_and_enclose_the_values(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high, num=5) == ticks


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.41234, "0.412"),
        (2.0, "2"),
        (8123.4, "8,123"),
        (2.5e-7, "2.5e-07"),
        (-0.04, "-0.04"),
        (99.96, "100"),
    ],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_a_line_runs_from_corner_to_corner() -> None:
    chart = line_chart("Reward", "mean", {"reward": [(1, 0.0), (3, 1.0)]})
    line = svg(chart).find("polyline")
    assert line is not None and line.get("points") == "52.0,228.0 468.0,32.0"  # the corners within the margins
    titles = [title.text for title in svg(chart).iter("title")]
    assert titles == ["step 1\nreward: 0", "step 3\nreward: 1"]


def test_one_point_is_a_dot() -> None:
    chart = svg(line_chart("Reward", "mean", {"reward": [(5, 0.3)]}))
    assert len(chart.findall("circle[@class='dot s1']")) == 1


def test_only_noisy_line_gets_running_mean() -> None:
    noisy = [(step, float(step % 2)) for step in range(100)]
    smooth = [(step, float(step)) for step in range(100)]
    assert len(svg(line_chart("a", "b", {"c": noisy})).findall("polyline")) == 2
    assert len(svg(line_chart("a", "b", {"c": smooth})).findall("polyline")) == 1


def test_running_mean() -> None:
    assert running_mean([(1, 0.0), (2, 3.0), (3, 6.0)], 2) == [(1, 1.5), (2, 3.0), (3, 4.5)]


def test_bars_are_stacked_and_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    series = {"generate": [(1, 1.0), (2, 3.0), (3, 2.0)], "update": [(1, 1.0), (2, 1.0), (3, 2.0)]}
    heights = [float(rect.get("height", 0)) for rect in svg(stacked_chart("T", "s", series)).iter("rect")]
    assert heights[0] == heights[1] and heights[2] == pytest.approx(3 * heights[3], abs=0.2)
    monkeypatch.setattr(charts, "MAX_BARS", 2)
    titles = [title.text for title in svg(stacked_chart("Time", "seconds", series)).iter("title")]
    assert titles == ["steps 1 to 2\ngenerate: 2\nupdate: 1", "step 3\ngenerate: 2\nupdate: 2"]


def test_labels_are_escaped() -> None:
    chart = line_chart("<Reward>", "a & b", {"<x>": [(1, 1.0)], "y": [(1, 2.0)]})
    assert "&lt;Reward&gt;" in chart and "a &amp; b" in chart and "<x>" not in chart
