"""One call of a reward function, and what came of it. Worker processes import this: the standard library only."""

import inspect
import numbers
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

from rlightning.foreign_text import cut


class Call(NamedTuple):
    """One function on one sample.

    Attributes:
        function: its index in the runner.
        sample: the sample's number; the runner gives each once.
        arguments: all keyword arguments.
    """

    function: int
    sample: int
    arguments: dict[str, Any]

    @property
    def key(self) -> int:
        """A number that no other call of the runner has; it fits into 64 bits."""
        return self.sample << 16 | self.function


class Outcome(NamedTuple):
    """What a call gave: a finite value, None ("does not apply"), or the text of an error, ending with its traceback."""

    value: float | None
    error: str | None = None

    @classmethod
    def failed(cls, error: str) -> "Outcome":
        """The outcome of a call that failed; the text is cut to a length that can be logged."""
        return cls(None, cut(error))


class Answered(NamedTuple):
    """A call, and what came of it."""

    call: Call
    outcome: Outcome


Report = Callable[[Answered | BaseException], None]
"""Receives the outcomes of a pool's calls, or the error that has ended its work. Any thread may call it."""


def to_number(value: Any) -> float | None:
    """A reward as a float; None stays None.

    Raises:
        TypeError: it is not a number.
        ValueError: it is not finite.
    """
    if value is None:
        return None
    if hasattr(value, "item"):  # a numpy or torch scalar
        value = value.item()
    if inspect.iscoroutine(value):
        value.close()  # or Python warns that nothing has awaited it
        raise TypeError(f"a reward must be a number or None, this one is a coroutine, {value!r}. Make it an async def.")
    if not isinstance(value, numbers.Real):
        raise TypeError(f"a reward must be a number or None, this one is {value!r}")
    number = float(value)
    if number - number != 0:
        raise ValueError(f"a reward must be finite, this one is {number}")
    return number


def failure(error: BaseException, skip: int = 1) -> Outcome:
    """The outcome of a call that raised; ``skip`` frames of ours come before the function's own."""
    frames: TracebackType | None = error.__traceback__
    for _ in range(skip):
        frames = frames.tb_next if frames is not None and frames.tb_next is not None else frames
    return Outcome.failed("".join(traceback.format_exception(type(error), error, frames)).rstrip())
