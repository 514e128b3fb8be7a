"""Makes the text of a model or a data set safe to display, with control characters and markup shown as written."""

import re

_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f\U000e0100-\U000e01ef]"
)
"""What hides, moves or reorders other text: control characters but tab and newline, other ends of lines, changes of the
direction of writing, characters without a shape (the joiners stay: emojis and scripts are written with them), and lone
surrogates, which UTF-8 does not have."""

_MARKDOWN = re.compile(r"[\\`*_~#!\[\]<>&|]")
_SPACES = re.compile(r"^ | $|(?<= ) |(?<=\n) |\t")


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
