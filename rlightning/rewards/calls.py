"""One call of a reward function, and its outcome.

Light, as each reward worker starts with it: the standard library only.
"""

import inspect
import numbers
import traceback
from collections.abc import Callable, Mapping
from typing import NamedTuple

from rlightning.foreign_text import cut


class RewardResult(NamedTuple):
    """What a call gave: a finite value, None ("does not apply"), or the text of an error, ending with its traceback."""

    value: float | None
    error: str | None = None

    @classmethod
    def failed(cls, error: str) -> "RewardResult":
        """Return the outcome of a call that failed; the text is cut to a length that can be logged."""
        return cls(None, cut(error))


RewardCallable = Callable[..., object]
"""A reward function: takes keyword arguments, and returns a number, None, or an awaitable of one of these."""


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


def failure(error: BaseException) -> RewardResult:
    """Return the outcome of a call that raised, without the frame of ours that comes before the function's own."""
    frames = error.__traceback__
    if frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    return RewardResult.failed("".join(traceback.format_exception(type(error), error, frames)).rstrip())


def run_call(function: RewardCallable, arguments: Mapping[str, object]) -> RewardResult:
    """Call the function; whatever it raises, SystemExit included, becomes an outcome."""
    try:
        return RewardResult(to_number(function(**arguments)))
    except BaseException as error:
        return failure(error)
