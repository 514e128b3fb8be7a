"""Outcomes of environments: validation, the reward of the whole trajectory, and conversion to and from plain types."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import SupportsFloat, get_args

from rlightning.environments.messages import Fields
from rlightning.foreign_text import cut_value
from rlightning.types.trajectory import AgentTrace, Outcome, Status, read_traces


def check_outcome(outcome: object, place: str = "run()") -> Outcome:
    """Validate an outcome, and return it with its numbers as floats.

    Raises:
        TypeError: ``outcome`` is not an Outcome, or one of its fields has the wrong type.
        ValueError: a reward is not finite, or the status is unknown.
    """
    if not isinstance(outcome, Outcome):
        kind = type(outcome).__name__
        raise TypeError(f"{place} returned {kind}, and has to return an Outcome: Outcome(reward=1.0).")
    if outcome.status not in get_args(Status):
        statuses = ", ".join(get_args(Status))
        raise ValueError(f"{place} returned the status {cut_value(outcome.status)}, and there are: {statuses}.")
    if not isinstance(outcome.metrics, Mapping):
        raise TypeError(f"{place} returned the metrics {cut_value(outcome.metrics)}, and has to return a dict.")
    reward, turn_rewards, traces = outcome.reward, outcome.turn_rewards, outcome.traces
    for name, value in (("turn_rewards", turn_rewards), ("traces", traces)):
        if value is not None and not isinstance(value, list | tuple):
            raise TypeError(f"{place} returned the {name} {cut_value(value)}, and has to return a list.")
    return replace(
        outcome,
        reward=reward if reward is None else _read_reward(reward, "reward", place),
        turn_rewards=turn_rewards and [_read_reward(one, "turn reward", place) for one in turn_rewards],
        metrics={str(name): _read_number(value, f"metric '{name}'", place) for name, value in outcome.metrics.items()},
        traces=traces and [_read_trace(one, place) for one in traces],
    )


def _read_trace(trace: object, place: str) -> AgentTrace:
    if not isinstance(trace, list | tuple) or len(trace) != len(AgentTrace._fields):
        given = cut_value(trace)
        raise TypeError(f"{place} returned the trace {given}, and has to return AgentTrace(agent, reward, turns).")
    read = AgentTrace._make(trace)
    return read._replace(reward=_read_reward(read.reward, "reward of a trace", place))


def _read_reward(value: object, what: str, place: str) -> float:
    number = _read_number(value, what, place)
    if not math.isfinite(number):
        raise ValueError(f"{place} returned the {what} {number}, and has to return a finite number.")
    return number


def _read_number(value: object, what: str, place: str) -> float:
    if not isinstance(value, float | int | SupportsFloat):  # the usual types first: checks of protocols are slow
        raise TypeError(f"{place} returned the {what} {cut_value(value)}, and has to return a number.")
    return float(value)


def total_reward(outcome: Outcome) -> float | None:
    """Return a trajectory's reward: the outcome's own, else the sum of its turns' rewards, else the mean reward of its
    agents' traces; None if the environment gave none of them.
    """
    traces = read_traces(outcome.traces)
    if outcome.reward is not None:
        return outcome.reward
    if outcome.turn_rewards:
        return math.fsum(outcome.turn_rewards)
    return math.fsum(trace.reward for trace in traces) / len(traces) if traces else None


def outcome_to_plain(outcome: Outcome) -> Fields:
    """Convert an outcome to plain types, for a checkpoint or another process."""
    traces = None if outcome.traces is None else [list(trace) for trace in outcome.traces]
    return [outcome.reward, outcome.turn_rewards, outcome.status, outcome.metrics, outcome.error, traces]


def outcome_from_plain(plain: Fields) -> Outcome:
    """Return the outcome from the plain types to which :func:`outcome_to_plain` converted it."""
    reward, turn_rewards, status, metrics, error, traces = plain
    return Outcome(reward, turn_rewards, status, metrics, error, read_traces(traces))
