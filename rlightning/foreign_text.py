"""Makes text from outside the package, such as exceptions, process logs and completions, safe to display.

Text that is quoted in a log line or an error is cut to a length by one of these functions, which mask the secrets given
to :func:`hide`. In texts that are displayed as a whole, control characters and markup are escaped. This module imports
only the standard library.
"""

import re
from collections.abc import Mapping

MAX_CHARACTERS = 8000
"""Maximum number of characters of a traceback or of the end of a log."""
LINE_CHARACTERS = 300
"""Maximum number of characters of an exception's message within a line."""
VALUE_CHARACTERS = 60
"""Maximum number of characters of a value within a line."""

_GAP = "\n[... {} characters left out ...]\n"

_SHORTEST_SECRET = 4
"""Least number of characters of a secret that is masked; shorter ones could be parts of other words."""

_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f\U000e0100-\U000e01ef]"
)
"""Characters that hide, move or reorder other text: control characters except tab and newline, other line ends, changes
of the direction of writing, invisible characters (except joiners, which emojis and some scripts need), and lone
surrogates, which UTF-8 does not have."""

_MARKDOWN = re.compile(r"[\\`*_~#!\[\]<>&|]")
_SPACES = re.compile(r"^ | $|(?<= ) |(?<=\n) |\t")

_references: dict[str, str] = {}


def hide(references: Mapping[str, str]) -> None:
    """From now on, mask these secrets in all texts that this process quotes or shows.

    Args:
        references: replacements by secret. If a secret has several words, as "Bearer ...", the last is masked, too.
    """
    for secret, reference in references.items():
        _references.update({t: reference for t in (secret, *secret.split()[-1:]) if len(t) >= _SHORTEST_SECRET})


def hidden() -> dict[str, str]:
    """Return the replacement of each secret given to :func:`hide`, so that another process can hide them too."""
    return dict(_references)


def without_secrets(text: str) -> str:
    """Return a text in which each secret given to :func:`hide` is replaced by its reference, such as
    ``${ENV:API_KEY}``.
    """
    for secret in sorted(_references, key=len, reverse=True):  # longest first: a secret may be a part of another
        text = text.replace(secret, _references[secret])
    return text


def cut(text: str, limit: int = MAX_CHARACTERS) -> str:
    """Return a text of at most ``limit`` characters: of a longer one the middle is left out, and a notice says so.

    Beginning and end stay, since a traceback ends with its cause, and a message begins with its subject. Where the
    limit leaves no room for the notice, only the beginning stays. Unpaired surrogates, which cannot be written to
    files, are escaped.
    """
    text = _escape_surrogates(without_secrets(text))
    if len(text) <= limit:
        return text
    half = (limit - len(_GAP.format(len(text)))) // 2
    if half < 1:
        return text[:limit]
    return f"{text[:half]}{_GAP.format(len(text) - 2 * half)}{text[len(text) - half :]}"


def cut_line(text: object, limit: int = LINE_CHARACTERS) -> str:
    """Return a text, or an exception's message, in one line of at most ``limit`` characters."""
    line = _escape_surrogates(" ".join(without_secrets(str(text)).split()))
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def describe_error(error: BaseException) -> str:
    """Return an exception's class and message in one line; the message alone is often unclear, as a KeyError's."""
    return cut_line(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def cut_value(value: object, limit: int = VALUE_CHARACTERS) -> str:
    """Return a value's repr in one line of at most ``limit`` characters."""
    return cut_line(repr(value), limit)


def _escape_surrogates(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def visible(text: str) -> str:
    r"""Return the text with control characters as escapes, such as ``\r`` and ``\x1b``; newlines and tabs stay."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def visible_on_one_line(text: str) -> str:
    """Return the text as :func:`visible`, with one space in place of each run of white space."""
    return " ".join(visible(text).split())


def markdown_cell(text: str) -> str:
    """Return Markdown for a table cell that renders as the text, including line breaks and spaces."""
    spaced = _SPACES.sub(lambda found: "\xa0" * (4 if found[0] == "\t" else 1), visible(text))
    escaped = _MARKDOWN.sub(lambda found: f"&#{ord(found[0])};", spaced)
    return escaped.replace("\n", "<br>")
