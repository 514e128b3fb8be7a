"""Deadlines, heartbeats and restart budgets, on a clock that the test sets."""

import time

import pytest

from rlightning.processes.liveness import Deadline, Heartbeat, RestartPolicy


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_deadline_counts_down_to_zero(clock: list[float]) -> None:
    deadline = Deadline(10.0)
    assert (deadline.remaining, deadline.is_over) == (10.0, False)
    clock[0] = 107.0
    assert (deadline.remaining, deadline.is_over) == (3.0, False)
    clock[0] = 111.0
    assert (deadline.remaining, deadline.is_over) == (0.0, True)


def test_wait_until_ends_at_condition_or_deadline(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(seconds: float) -> None:
        clock[0] += 1.0

    monkeypatch.setattr(time, "sleep", sleep)
    assert Deadline(10.0).wait_until(lambda: clock[0] >= 103.0) and clock[0] == 103.0
    assert not Deadline(2.0).wait_until(lambda: False) and clock[0] == 105.0
    assert Deadline(0.0).wait_until(lambda: True)


def test_heartbeat_counts_the_silence_that_could_be_observed(clock: list[float]) -> None:
    heartbeat = Heartbeat(interval=1.0)
    clock[0] = 101.0
    assert heartbeat.tick() == 1.0
    clock[0] = 201.0  # this process was suspended
    assert heartbeat.tick() == 3.0
    heartbeat.beat()
    clock[0] = 201.5
    assert heartbeat.tick() == 0.5


def test_restart_budget_is_spent_and_restored() -> None:
    policy = RestartPolicy(max_restarts=2)
    assert [policy.take() for _ in range(3)] == [True, True, False]
    policy.reset()
    assert policy.take() and policy.num_restarts == 1
