"""One call of a reward function: the function where it runs, and what a call gives.

Light, as each reward worker starts with it: the standard library only.
"""

import inspect
import numbers
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

from rlightning.foreign_text import cut


class Outcome(NamedTuple):
    """What a call gave: a finite value, None ("does not apply"), or the text of an error, ending with its traceback."""

    value: float | None
    error: str | None = None

    @classmethod
    def failed(cls, error: str) -> "Outcome":
        """Return the outcome of a call that failed; the text is cut to a length that can be logged."""
        return cls(None, cut(error))


class Function(NamedTuple):
    """A reward function where it runs.

    Attributes:
        function: to call; an :class:`Outcome` is that of each call, as the function could not be imported.
        is_async: whether it mostly waits, so that many calls may run at once.
        timeout: seconds.
    """

    function: Callable[..., Any] | Outcome
    is_async: bool
    timeout: float


def to_number(value: object) -> float | None:
    """Return a reward as a float; None stays None.

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
    """Return the outcome of a call that raised; ``skip`` frames of ours come before the function's own."""
    frames: TracebackType | None = error.__traceback__
    for _ in range(skip):
        frames = frames.tb_next if frames is not None and frames.tb_next is not None else frames
    return Outcome.failed("".join(traceback.format_exception(type(error), error, frames)).rstrip())


def run_call(function: Callable[..., Any] | Outcome, arguments: dict[str, Any]) -> Outcome:
    """Call the function; whatever it raises, SystemExit included, becomes an outcome."""
    if isinstance(function, Outcome):
        return function
    try:
        return Outcome(to_number(function(**arguments)))
    except BaseException as error:
        return failure(error)
