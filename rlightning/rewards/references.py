"""Finds reference answers that get no reward when they are scored as completions."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar, overload

from rlightning.callables import layers
from rlightning.errors import ConfigError
from rlightning.foreign_text import VALUE_CHARACTERS, cut_line, cut_value
from rlightning.rewards.calls import RewardCallable, RewardResult

if TYPE_CHECKING:
    from rlightning.types import Prompt

logger = logging.getLogger(__name__)

MAX_REFERENCES = 2000
"""Maximum number of rows of a prompt set that are checked."""
MAX_SHOWN = 3

Function = TypeVar("Function", bound=RewardCallable)


class AnswerCheck(NamedTuple):
    """Settings of an :func:`answer_checker`: its parameter for the reference, and how a reference becomes a completion.

    Attributes:
        parameter: the function's parameter for the reference.
        completion: format string that turns the reference into a completion.
    """

    parameter: str
    completion: str

    def make_completion(self, reference: object) -> str:
        """Return a completion whose answer is the reference; several reference answers are joined by commas."""
        shown: object = ", ".join(map(str, reference)) if isinstance(reference, list | tuple) else reference
        return self.completion.format(shown)


@overload
def answer_checker(function: Function) -> Function: ...


@overload
def answer_checker(*, parameter: str = ..., completion: str = ...) -> Callable[[Function], Function]: ...


def answer_checker(
    function: Function | None = None, *, parameter: str = "answer", completion: str = "{}"
) -> Function | Callable[[Function], Function]:
    """Decorate a reward function as an answer checker: a completion equal to the reference gets a reward above 0.

    Before a run starts, each decorated function scores the references of the prompt sets as completions.

    Args:
        function: the reward function, if the decorator is used without parentheses.
        parameter: the function's parameter for the reference.
        completion: format string that turns the reference into a completion, such as ``"<answer>{}</answer>"``.
    """

    def mark(function: Function) -> Function:
        function.answer_check = AnswerCheck(parameter, completion)  # type: ignore[attr-defined]
        return function

    return mark if function is None else mark(function)


def find_answer_check(function: object) -> AnswerCheck | None:
    """Return the AnswerCheck that :func:`answer_checker` attached to a function or a ``partial`` of it; else None."""
    marks = (one.answer_check for one in layers(function) if hasattr(one, "answer_check"))
    return next((mark for mark in marks if isinstance(mark, AnswerCheck)), None)


def choose_evenly(prompts: "Sequence[Prompt]") -> "list[Prompt]":
    """Return at most :data:`MAX_REFERENCES` prompts, evenly spread over the set."""
    count = min(len(prompts), MAX_REFERENCES)
    return [prompts[i * len(prompts) // count] for i in range(count)]


def report_unrewarded(
    name: str,
    column: str,
    prompts: "Mapping[int, Prompt]",
    outcomes: Mapping[int, RewardResult],
    where: Callable[[int], str],
    max_share: float,
) -> None:
    """Warn of reference answers that their own answer checker gives no reward; too large a share of them is an error.

    Args:
        outcomes: results by the prompt's index; prompts to which the function does not apply are not counted.
        where: returns the file and line of a row, for the error.
        max_share: maximum share of unrewarded references.

    Raises:
        ConfigError: a larger share is unrewarded.
    """
    graded = {number: outcome for number, outcome in outcomes.items() if outcome.error or outcome.value is not None}
    unrewarded = [number for number, outcome in sorted(graded.items()) if outcome.error or (outcome.value or 0) <= 0]
    if not unrewarded:
        return
    shown = [
        f"{where(prompts[number].index)}: {cut_value(prompts[number].columns[column])}{_reason(graded[number])}"
        for number in unrewarded[:MAX_SHOWN]
    ]
    message = (
        f"Reward '{name}' gives no reward to the reference answer itself in {len(unrewarded)} of {len(graded)} rows: "
        f"{'; '.join(shown)}{'; ...' if len(unrewarded) > MAX_SHOWN else ''}. No completion can be right there."
    )
    if len(unrewarded) > max_share * len(graded):
        raise ConfigError(
            f"{message} Correct the column '{column}', name another by the reward's columns, or allow more than "
            f"model.max_unrewarded_references={max_share:g}."
        )
    logger.warning("%s", message)


def _reason(outcome: RewardResult) -> str:
    return f" ({cut_line(outcome.error.splitlines()[-1], VALUE_CHARACTERS)})" if outcome.error else ""
