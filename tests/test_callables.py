"""Callables that users give as functions: which code a call runs."""

import functools
from typing import Any

import pytest

from rlightning.callables import is_async, is_coroutine_function, layers


async def solve() -> None:
    """Do nothing."""


@functools.wraps(solve)
def wrapped() -> Any:
    """Return a coroutine."""
    return solve()


class Solver:
    """A callable object."""

    async def __call__(self) -> None:
        """Do nothing."""


class Answers:
    """A function that has every attribute."""

    def __getattr__(self, name: str) -> "Answers":
        return self

    def __call__(self) -> None:
        """Do nothing."""


def make_cycle() -> Any:
    """A function that wraps itself."""

    def cycle() -> None:
        pass

    cycle.__wrapped__ = cycle  # type: ignore[attr-defined]
    return cycle


@pytest.mark.parametrize(
    ("function", "runs_async", "returns_coroutine"),
    [
        (solve, True, True),
        (functools.partial(solve), True, True),
        (Solver(), True, True),
        (functools.partial(Solver()), True, True),
        (wrapped, True, False),
        (print, False, False),
        (Answers(), False, False),
        (make_cycle(), False, False),
    ],
)
def test_what_a_call_runs(function: Any, runs_async: bool, returns_coroutine: bool) -> None:
    assert (is_async(function), is_coroutine_function(function)) == (runs_async, returns_coroutine)
    assert len(list(layers(function))) <= 4
