"""Finds the answer in a completion or in a reference solution."""

import re
from typing import NamedTuple

from rlightning.rewards.answers.kinds import Answer, Text
from rlightning.rewards.answers.notation import BOX, closing_brace, normalize
from rlightning.rewards.answers.phrases import PHRASE, find_unmarked, is_prose
from rlightning.rewards.answers.prose import leading_value
from rlightning.rewards.answers.reading import read_answer, words_of


class Mark(NamedTuple):
    """A marked answer in a text: the mark's position, the marked text, and whether the mark is an ``<answer>`` tag."""

    place: int
    content: str
    is_tag: bool = False


_HASHES = re.compile(r"(?<![#\\])####(?!#)[ \t]*(.*(?:\n[ \t]*(?!####)\S.*)?)")
_TAG = re.compile(r"[<\[](/?)answer[>\]]", re.IGNORECASE)
_ANYTHING, _DIGIT = re.compile(r"\S"), re.compile(r"\d")
_HEADING = re.compile(r"\d+(?:\s*[.):]\s+\S|\s+[A-Z])")
MAX_TAG_WORDS = 3
"""Maximum number of words of an answer in ``<answer>``; a longer text is a sentence."""


def find_mark(text: str) -> Mark | None:
    """Return the last marked answer: in a LaTeX box, after ``#### `` (GSM8K), in ``<answer>`` or after ``[answer]``.

    An empty box counts as a mark, with an empty answer.
    """
    text = _TAG.sub(r"<\1answer>", text)  # keeps the text's length
    marks = [*_boxes(text), *_hashes(text)]
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    if start >= 0 and not BOX.search(text, start, end):
        marks.append(Mark(start, text[start + len("<answer>") : end], True))
    return max(marks, default=None)


def find_answer(text: str) -> Answer | None:
    """Return the final answer of a completion.

    The answer is the first of these that exists: the last mark; the text after the last "answer is" or "Answer:"; the
    whole text if it is only an answer; its last formula or number. Text between ``<think>`` and ``</think>`` is
    ignored.
    """
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    mark = find_mark(text)
    if mark is None:
        return find_unmarked(text)
    return _read_tag(mark.content) if mark.is_tag else _read_marked(mark.content)


def read_reference(text: str) -> Answer | None:
    """Return the answer in a reference solution: the marked one, else one stated in a sentence, else the whole text."""
    mark = find_mark(text)
    return _read_marked(text if mark is None else mark.content)


def _read_marked(text: str) -> Answer | None:
    whole = read_answer(text)
    is_sentence = PHRASE.search(text) and (whole is None or isinstance(whole, Text) or is_prose(text, whole))
    return find_unmarked(text) if is_sentence else whole


def _read_tag(text: str) -> Answer | None:
    """Return the answer inside ``<answer>`` tags: the whole text, what a sentence in it states, or a few words."""
    whole = read_answer(text)
    is_answer = isinstance(whole, Text) and len(text.split()) <= MAX_TAG_WORDS and not PHRASE.search(text)
    return whole if is_answer else find_unmarked(text)


def _boxes(text: str) -> list[Mark]:
    boxes = []
    end = 0
    for match in BOX.finditer(text):
        if match.start() < end:  # inside another box
            continue
        if text.startswith("{", match.end()):
            closing = closing_brace(text, match.end())
            end = len(text) if closing is None else closing
            # A box that the token limit has cut has no answer: 7 may be the beginning of 73.
            boxes.append(Mark(match.start(), "" if closing is None else text[match.end() + 1 : closing]))
        else:  # Without braces the whole text is meant, although TeX would box only one character.
            bare = re.match(r"[\w.,/-]+", text[match.end() :])
            boxes.append(Mark(match.start(), bare[0].rstrip(".,") if bare else ""))
    return boxes


def _hashes(text: str) -> list[Mark]:
    """Return the last answer after ``####``, ignoring Markdown headings of that level."""
    for match in reversed(list(_HASHES.finditer(text))):
        line, _, following = (part.strip() for part in match[1].partition("\n"))
        content = line or following
        if _HEADING.match(content) or PHRASE.search(content):
            continue
        value = leading_value(normalize(content))
        end = text.index(content, match.start(1)) + len(content)
        if not _ANYTHING.search(text, end) and (value is not None or not BOX.search(content)):
            return [Mark(match.start(), value or content)]
        # A number with words after it is a heading, if numbers follow below.
        is_bare = value is not None and re.fullmatch(r"\W*", normalize(content)[len(value) :]) and not words_of(value)
        if value is not None and (is_bare or not _DIGIT.search(text, end)):
            return [Mark(match.start(), value)]
    return []
