"""The report of a bottleneck names the side that waits, how long, and the key to change, once."""

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rlightning.callbacks import VLLMRollout
from rlightning.rollout.async_metrics import WINDOW_STEPS, BottleneckMonitor, StepTotals


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds, in the one item of a list."""
    seconds = [100.0]
    monkeypatch.setattr("rlightning.rollout.async_metrics.time", SimpleNamespace(monotonic=lambda: seconds[0]))
    return seconds


def window(
    monitored: BottleneckMonitor,
    clock: list[float],
    trainer_waited: float,
    engines_idle: float,
    **counts: Any,
) -> list[str]:
    """Return the report on a window of steps that take 2 s each."""
    said = []
    for _ in range(WINDOW_STEPS):
        clock[0] += 2.0
        totals = StepTotals(trainer_wait_seconds=trainer_waited, engine_idle_seconds=engines_idle, **counts)
        said.append(monitored.add(totals))
    assert not any(said[:-1])
    return [sentence for sentence in said if sentence]


def monitor(num_engines: int, engines_key: str = "rollout.num_engines") -> BottleneckMonitor:
    return BottleneckMonitor(max_staleness=1, num_engines=num_engines, engines_key=engines_key)


def test_a_trainer_that_waits_is_told_about_once(clock: list[float]) -> None:
    told = monitor(3)
    (sentence,) = window(told, clock, 1.0, 0.2)
    assert sentence.startswith("The trainer has waited for completions 50% of the last 20 steps.")
    assert "rollout.num_engines, now 3" in sentence and "rollout.max_staleness, now 1" in sentence
    assert window(told, clock, 1.0, 0.2) == []
    (sentence,) = window(told, clock, 0.1, 0.8)
    assert sentence.startswith("The engines have had nothing to do 40% of the last 20 steps.")
    assert "trainer.devices" in sentence


def test_a_run_in_balance_is_left_in_peace(clock: list[float]) -> None:
    assert window(monitor(1), clock, 0.5, 0.5) == []


def test_rewards_that_hold_up_the_trainer_are_named(clock: list[float]) -> None:
    told = monitor(3)
    (sentence,) = window(told, clock, 1.0, 1.5, num_running=4, num_scoring=3)
    assert sentence.startswith("The trainer has waited for rewards 50% of the last 20 steps:")
    assert "model.rewards" in sentence and "rollout.max_staleness, now 1" in sentence
    (sentence,) = window(told, clock, 1.0, 0.2, num_running=4, num_scoring=2)
    assert sentence.startswith("The trainer has waited for completions 50%")


def test_bottleneck_advice_names_the_engines_key(clock: list[float]) -> None:
    (sentence,) = window(monitor(2, "rollout.engines"), clock, 1.0, 0.2)
    assert "Add engines (rollout.engines, now 2)" in sentence


@pytest.mark.parametrize(
    ("engines", "key"), [(["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"], "rollout.engines"), ([], "rollout.num_engines")]
)
def test_engines_key_ignores_urls_set_by_controller(engines: list[str], key: str) -> None:
    rollout = VLLMRollout(placement="standalone", num_engines=2, engines=engines)
    knowing = copy.copy(rollout)
    knowing.options = replace(rollout.options, engines=("tcp://127.0.0.1:3", "tcp://127.0.0.1:4"))
    assert knowing.engines_key == key
