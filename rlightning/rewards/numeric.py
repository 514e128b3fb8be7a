"""The reward function for answers that are numbers, formulas, choices or short texts."""

import contextlib
import signal
import threading
from collections.abc import Iterator

from rlightning.rewards.answers import Answer, Text, answers_equal, find_answer, read_listing, read_reference
from rlightning.rewards.references import answer_checker

TIME_LIMIT = 3
"""Maximum seconds of a comparison; a formula that takes longer counts as wrong."""


@answer_checker
def numeric_answer(completion: str, answer: object) -> float:
    """Return 1 if the completion's answer equals the reference, else 0.

    The completion's answer is its last ``\\boxed{...}``, ``<answer>`` or GSM8K's ``#### 18``, or else the text after
    the last "answer is" or "Answer:", or else its last formula or number. Answer and reference may be numbers
    (decimals, fractions, mixed, scientific, percent, with currency or unit), formulas, choices, lists, points,
    intervals, sets, equations, inequalities, congruences, matrices, ratios, numbers with a base, and words.

    - Exact values are compared exactly; a decimal may differ by a relative 1e-6, and by less than one unit of its last
      digit.
    - Lists without brackets and sets in braces are equal in any order; points, tuples and intervals are ordered.
    - Equations are equal up to a factor. ``x = 5`` is the answer 5.
    - ``50%`` equals both 0.5 and 50. Units are compared if both are known; they are not converted.
    - Formulas that math-verify's parser cannot read are compared as text.

    Args:
        completion: the model's text.
        answer: the column ``answer``: an answer with or without dollars or a box, a list of answers, a sentence with
            "answer is", or a solution that ends with a box or ``#### 18``.

    Raises:
        ValueError: the reference contains no answer, or is prose.
    """
    reference = _read_reference(answer)
    if isinstance(reference, Text) and completion.strip() == str(answer).strip():
        return 1.0
    # A text that is nested too deeply for the parsers is wrong too.
    with _time_limit(), contextlib.suppress(RecursionError):
        given = find_answer(completion)
        return float(given is not None and answers_equal(reference, given))
    return 0.0


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """Context manager that raises an error after :data:`TIME_LIMIT`, by a signal, which only a main thread gets.

    In other threads only the runner's timeout applies.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signal_number: int, frame: object) -> None:
        raise _TimeLimitError

    previous = signal.signal(signal.SIGALRM, stop)
    # Repeatedly: an exception that is raised in a callback of the garbage collector is lost.
    signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT, TIME_LIMIT)
    try:
        with contextlib.suppress(_TimeLimitError):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


class _TimeLimitError(BaseException):
    """The time limit has passed. Not an Exception, because sympy and the parser catch those."""


def _read_reference(answer: object) -> Answer:
    read = None
    if isinstance(answer, list | tuple):
        read = read_listing([str(item) for item in answer]) if answer else None
    elif answer is not None:
        read = read_reference(str(answer))
    if read is None:
        raise ValueError(f"The reference answer {str(answer)[-80:]!r} holds no answer that can be read as a whole.")
    return read
