"""Recognises the error that an agent's API client raises when a sequence has no room for another turn."""

from __future__ import annotations

from contextlib import suppress

from rlightning.environments.environment import LimitReachedError
from rlightning.errors import cause_chain

LIMIT_TEXT = "This model's maximum context length is"
"""Beginning of OpenAI's message of this error, which clients recognise, and :func:`is_limit` in their errors."""
OTHER_TRACEBACK = "During handling of the above exception, another exception occurred:"
"""Python's line between two tracebacks; only the error after the last one ended the program."""


def is_limit(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, says that the sequence of a request had no room for a turn."""
    for one in cause_chain(error):
        said = str(one).rpartition(OTHER_TRACEBACK)[2]
        with suppress(Exception):  # of clients whose errors do not quote the answer, such as httpx
            said += one.response.text  # type: ignore[attr-defined]
        if isinstance(one, LimitReachedError) or LIMIT_TEXT in said:
            return True
    return False
