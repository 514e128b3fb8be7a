"""Reward functions that depend only on the completion's text and length."""

import re


def exact_match(completion: str, answer: object, *, ignore_case: bool = False) -> float:
    """Return 1 if the completion equals the answer, ignoring white space around both; else 0.

    Args:
        completion: the model's text.
        answer: the column ``answer``; compared as text.
        ignore_case: whether to ignore case.
    """
    given, wanted = completion.strip(), str(answer).strip()
    if ignore_case:
        given, wanted = given.casefold(), wanted.casefold()
    return float(given == wanted)


def regex_format(completion: str, *, pattern: str) -> float:
    """Return 1 if ``pattern`` matches the whole completion (a dot matches line ends too), else 0."""
    return float(re.fullmatch(pattern, completion, re.DOTALL) is not None)


def length_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int) -> float:
    """Return DAPO's soft overlong punishment, a reward from -1 to 0 for a length (arXiv:2503.14476, eq. 13).

    It is 0 up to ``max_tokens - buffer_tokens`` tokens, then falls linearly to -1 at ``max_tokens``, and is -1 beyond.

    Args:
        num_tokens: length of the completion.
        max_tokens: length with the full penalty; usually the sampling limit ``max_new_tokens``.
        buffer_tokens: number of tokens over which the reward falls.
    """
    over = num_tokens - (max_tokens - buffer_tokens)
    return -min(1.0, over / buffer_tokens) if over > 0 else 0.0
