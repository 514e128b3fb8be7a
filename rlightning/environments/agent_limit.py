"""Recognizes the error that an agent's API client raises if a sequence has its maximum length."""

from __future__ import annotations

from contextlib import suppress

from rlightning.environments.environment import LimitReachedError
from rlightning.errors import cause_chain

LIMIT_TEXT = "This model's maximum context length is"
"""Beginning of OpenAI's message of this error, by which clients and :func:`is_limit` recognize it."""
OTHER_TRACEBACK = "During handling of the above exception, another exception occurred:"
"""Python's line between two tracebacks; the program ended with the error after the last one."""


def is_limit(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, says that a request's sequence has reached the maximum length."""
    for one in cause_chain(error):
        said = str(one).rpartition(OTHER_TRACEBACK)[2]
        with suppress(Exception):  # clients such as httpx leave the response's text out of their errors
            said += one.response.text  # type: ignore[attr-defined]
        if isinstance(one, LimitReachedError) or LIMIT_TEXT in said:
            return True
    return False
