"""Cuts text from outside the package, such as exception messages and process logs, to a length, without secrets.

Whatever quotes such text in a log line or an error passes it through one of these functions. Secrets that
:func:`hide` was given are left out. Standard library only.
"""

from collections.abc import Mapping

MAX_CHARACTERS = 8000
"""Of a traceback or of the end of a log."""
LINE_CHARACTERS = 300
"""Of an exception's message in a line of ours."""
VALUE_CHARACTERS = 60
"""Of a value in a line of ours."""

_SHORTEST_SECRET = 4
"""Characters; what is shorter is a part of other words."""

_references: dict[str, str] = {}


def hide(references: Mapping[str, str]) -> None:
    """Replace these secrets by references in all texts of this process from now on.

    Args:
        references: by the secret; of several words, the last is hidden alone too, as that of "Bearer ...".
    """
    for secret, reference in references.items():
        _references.update({t: reference for t in (secret, *secret.split()[-1:]) if len(t) >= _SHORTEST_SECRET})


def hidden() -> dict[str, str]:
    """Return the secrets given to :func:`hide`, to pass them to another process."""
    return dict(_references)


def without_secrets(text: str) -> str:
    """Return a text with references in place of secrets."""
    for secret in sorted(_references, key=len, reverse=True):  # others may be parts of a longer one
        text = text.replace(secret, _references[secret])
    return text


def cut(text: str, limit: int = MAX_CHARACTERS) -> str:
    """Return a text with its middle left out if it is longer than ``limit`` characters.

    The start and the end stay: a traceback has its cause last, a long message what it is about first. Characters that
    no file can hold (lone surrogates) are written as escapes.
    """
    text = without_secrets(text)
    if len(text) > limit:
        half = limit // 2
        gap = f"\n[... {len(text) - 2 * half} characters left out ...]\n"
        text = f"{text[:half]}{gap}{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()


def cut_line(text: object, limit: int = LINE_CHARACTERS) -> str:
    """Return a text, or an exception's message, in one line of at most ``limit`` characters."""
    line = " ".join(without_secrets(str(text)).split())
    line = line if len(line) <= limit else f"{line[: limit - 3]}..."
    return line.encode("utf-8", "backslashreplace").decode()


def describe_error(error: BaseException) -> str:
    """Return an exception's class and message in one line: a KeyError's message, say, is unclear alone."""
    return cut_line(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def cut_value(value: object, limit: int = VALUE_CHARACTERS) -> str:
    """Return a value's repr in one line of at most ``limit`` characters."""
    return cut_line(repr(value), limit)
