"""One call of a reward function, and its outcome.

Imports only the standard library, so that reward workers start quickly.
"""

import inspect
import numbers
import traceback
from collections.abc import Callable, Mapping
from typing import NamedTuple

from rlightning.foreign_text import cut, cut_line


class RewardResult(NamedTuple):
    """The result of a call: a finite value, None if the function does not apply, or an error with its traceback."""

    value: float | None
    error: str | None = None

    @classmethod
    def failed(cls, error: str) -> "RewardResult":
        """Return the result of a failed call; the error text is cut to a length that can be logged."""
        return cls(None, cut(error))


def error_line(error: str) -> str:
    """Return the line of a failed call's error that names it: the last one of a traceback, otherwise the first."""
    lines = error.strip().splitlines() or [""]
    return cut_line(lines[-1] if lines[0].startswith("Traceback") else lines[0])


RewardCallable = Callable[..., object]
"""A reward function: takes keyword arguments, and returns a number, None, or an awaitable of one of these."""


def to_number(value: object) -> float | None:
    """Return a reward as a float; None stays None.

    Raises:
        TypeError: the value is not a number.
        ValueError: the value is not finite.
    """
    if value is None:
        return None
    if hasattr(value, "item"):  # a numpy or torch scalar
        value = value.item()
    if inspect.iscoroutine(value):
        value.close()  # otherwise Python warns that it was never awaited
        raise TypeError(f"a reward must be a number or None, this one is a coroutine, {value!r}. Make it an async def.")
    if not isinstance(value, numbers.Real):
        raise TypeError(f"a reward must be a number or None, this one is {value!r}")
    number = float(value)
    if number - number != 0:
        raise ValueError(f"a reward must be finite, this one is {number}")
    return number


def failure(error: BaseException) -> RewardResult:
    """Return the result of a call that raised ``error``, without this package's frames in the traceback."""
    frames = error.__traceback__
    if frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    return RewardResult.failed("".join(traceback.format_exception(type(error), error, frames)).rstrip())


def run_call(function: RewardCallable, arguments: Mapping[str, object]) -> RewardResult:
    """Call a function; an exception, including SystemExit, becomes a failed result."""
    try:
        return RewardResult(to_number(function(**arguments)))
    except BaseException as error:
        return failure(error)
