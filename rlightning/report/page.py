"""The report of a run as one self-contained HTML file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from html import escape
from importlib.resources import files
from statistics import fmean, median

from rlightning.foreign_text import visible
from rlightning.phases import PHASES
from rlightning.report.charts import line_chart, number, stacked_chart
from rlightning.report.history import History, Points
from rlightning.report.trajectories import Completion

_CHARTS: tuple[tuple[str, str, dict[str, str], bool], ...] = (
    ("Reward", "mean reward a completion", {"reward/mean": "mean"}, False),
    ("Completion length", "tokens", {"completion/length": "mean", "completion/length_max": "longest"}, True),
    ("Truncated, without signal, failed", "share", {
        "completion/truncated": "truncated completions",
        "reward/no_signal": "groups without signal",
        "reward/failed": "failed rewards",
    }, True),
    ("Loss", "loss", {"policy/loss": "loss"}, False),
    ("KL to the reference", "nats a token", {"policy/kl": "KL"}, True),
    ("Entropy", "nats a token", {"policy/entropy": "entropy"}, True),
    ("Clipped tokens", "share", {"policy/clip_low": "at the lower bound", "policy/clip_high": "at the upper bound"},
    True), ("Gap between sampler and trainer, mean", "nats a token", {"policy/rollout_gap_mean": "mean"}, True),
    ("Gap between sampler and trainer, largest", "nats", {"policy/rollout_gap_max": "largest"}, True),
    ("Gradient norm", "norm before clipping", {"optim/grad_norm": "norm"}, True),
    ("Learning rate", "learning rate", {"optim/lr": "learning rate"}, True),
    ("Throughput", "tokens a second", {"throughput/tokens_per_second": "tokens/s"}, True),
)  # fmt: skip
_REWARD_TOTALS = {"reward/mean", "reward/std", "reward/no_signal", "reward/failed"}


@dataclass
class Run:
    """The data of one training run from which :func:`render` makes the HTML report.

    Attributes:
        name: the heading.
        status: text on how the run ended.
        is_failed: whether the run was interrupted or failed.
        step: number of finished rollout steps.
        seconds: duration, including the earlier runs that this run has resumed.
        history: all metrics.
        completions: for some steps a list of completions each.
        settings: hyperparameters by name.
        machine: versions and hardware by name.
        config: the resolved YAML, if there is one.
    """

    name: str
    status: str
    is_failed: bool
    step: int
    seconds: float
    history: History
    completions: Sequence[Sequence[Completion]] = ()
    settings: Mapping[str, object] = field(default_factory=dict)
    machine: Mapping[str, object] = field(default_factory=dict)
    config: str | None = None


def render(run: Run) -> str:
    """Return the HTML page of a run's report."""
    sections = [
        ("Curves", f'<div class="charts">{"".join(charts(run.history))}</div>'),
        ("Time", _time_section(run.history)),
        ("Completions", _samples_section(run)),
        ("Settings", _settings_section(run)),
    ]
    body = "".join(f"<section><h2>{title}</h2>{content}</section>" for title, content in sections if content)
    style = (files("rlightning.report") / "page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.name)}</title><style>\n{style}</style></head>"
        f"<body><main>{_header(run)}{body}</main></body></html>\n"
    )


def charts(history: History) -> list[str]:
    """Return the report's SVG charts: training, each reward function, validation; those without data are left out."""
    drawn = []
    for title, label, names, from_zero in _CHARTS:
        series = {text: history.series[name] for name, text in names.items() if history.series.get(name)}
        # Lines that are always zero are left out: a share is drawn only if it was ever nonzero.
        if label == "share":
            series = {text: points for text, points in series.items() if any(value for _, value in points)}
        if series:
            drawn.append(line_chart(title, label, series, from_zero=from_zero))
        if title == "Reward":
            drawn += _reward_and_validation_charts(history)
    return drawn


def _reward_and_validation_charts(history: History) -> list[str]:
    drawn = []
    parts = {n.removeprefix("reward/"): p for n, p in history.series.items() if n.startswith("reward/") and p}
    parts = {name: points for name, points in parts.items() if f"reward/{name}" not in _REWARD_TOTALS}
    if len(parts) > 1:
        drawn.append(line_chart("Reward by function", "mean, unweighted", parts))
    passes, rewards = validation_series(history, "pass@"), validation_series(history, "reward")
    if passes:
        drawn.append(line_chart("Validation, pass@k", "share solved", passes, from_zero=True))
    if rewards and rewards.values() != passes.values():
        drawn.append(line_chart("Validation, reward", "mean reward", rewards))
    return drawn


def validation_series(history: History, metric: str) -> dict[str, Points]:
    """Return the points of ``val/<set>/<metric...>``, labelled by set and metric."""
    found = {}
    for name, points in history.series.items():
        parts = name.split("/")
        if len(parts) == 3 and parts[0] == "val" and parts[2].startswith(metric) and points:
            found[f"{parts[1]} {parts[2]}" if metric.endswith("@") else parts[1]] = points
    return found


def _header(run: Run) -> str:
    elapsed = timedelta(seconds=round(run.seconds))
    status = f'<span class="{"failed" if run.is_failed else "well"}">{_written(run.status)}</span>'
    return (
        f"<header><h1>{escape(run.name)}</h1><p>{status} · {run.step:,} rollout steps · {elapsed}</p></header>"
        f'<div class="tiles">{"".join(_tiles(run.history))}</div>'
    )


def _tiles(history: History) -> list[str]:
    tiles = []
    for label, name in _tile_metrics(history):
        points = [value for _, value in history.series[name]]
        # Single steps are noisy: first and last values are means over a twentieth of the run.
        num = max(len(points) // 20, 1)
        before, after = number(fmean(points[:num])), number(fmean(points[-num:]))
        tiles.append(f'<div class="tile"><b>{after}</b><span>{escape(label)}, from&nbsp;{before}</span></div>')
    for label, name in (
        ("median tokens a second", "throughput/tokens_per_second"),
        ("median seconds a step", "time/step"),
    ):
        values = [value for _, value in history.series.get(name, [])]
        if values:
            tiles.append(f'<div class="tile"><b>{number(median(values))}</b><span>{label}</span></div>')
    return tiles


def _tile_metrics(history: History) -> list[tuple[str, str]]:
    """Return the metrics of the summary: reward, or loss without one; the validation sets; completion length."""
    chosen = [("mean reward", "reward/mean")] if "reward/mean" in history.series else [("loss", "policy/loss")]
    chosen += [(n[4:].replace("/", " "), n) for n in history.series if n.startswith("val/") and "/pass@" in n][:3]
    chosen.append(("tokens a completion", "completion/length"))
    return [(label, name) for label, name in chosen if history.series.get(name)]


def _time_section(history: History) -> str:
    steps = dict(history.series.get("time/step", []))
    if not steps:
        return ""
    series = {phase: history.series[f"time/{phase}"] for phase in PHASES if history.series.get(f"time/{phase}")}
    known = dict.fromkeys(steps, 0.0)
    for points in series.values():
        for step, seconds in points:
            if step in known:
                known[step] += seconds
    series["other"] = [(step, max(seconds - known[step], 0.0)) for step, seconds in steps.items()]
    return f'<div class="charts">{stacked_chart("Seconds a step, by phase", "seconds", series)}</div>'


def _samples_section(run: Run) -> str:
    columns = [
        f"<div><h3>Step {rows[0].step:,}</h3>{''.join(_sample(row) for row in rows)}</div>"
        for rows in run.completions
        if rows
    ]
    return f'<div class="columns">{"".join(columns)}</div>' if columns else ""


def _sample(row: Completion) -> str:
    cut = " · cut at the token limit" if row.finish_reason == "length" else ""
    # A newline after <pre> is not part of its text.
    return (
        f'<div class="sample"><p><b>reward {number(row.reward)}</b> {row.length:,} tokens{cut}</p>'
        f'<pre class="prompt">\n{_written(row.prompt)}</pre>'
        f'<pre class="completion">\n{_written(row.completion)}</pre></div>'
    )


def _settings_section(run: Run) -> str:
    boxes = [_table(values) for values in (run.settings, run.machine) if values]
    config = ""
    if run.config:
        text = _written(run.config)
        config = f'<details class="box"><summary>Resolved configuration</summary><pre>\n{text}</pre></details>'
    return f'<div class="columns">{"".join(boxes)}</div>{config}' if boxes or config else ""


def _table(values: Mapping[str, object]) -> str:
    rows = [f"<tr><td>{escape(name)}</td><td>{_written(_text(value))}</td></tr>" for name, value in values.items()]
    return f'<div class="box"><table>{"".join(rows)}</table></div>'


def _written(text: str) -> str:
    """Escape a text for HTML, with control characters made visible."""
    return escape(visible(text))


def _text(value: object) -> str:
    if isinstance(value, float):
        return number(value)
    return "none" if value is None else str(value)
