"""Where the answer stands in what a model wrote, or in a solution."""

# ruff: noqa: RUF001 (a full-width colon)

import re
from typing import NamedTuple

from rlightning.rewards.answers.notation import closing_brace, normalize
from rlightning.rewards.answers.numbers import NUMBER, UNIT, Number, read_number
from rlightning.rewards.answers.reading import (
    Answer,
    Choice,
    Listing,
    Text,
    read_answer,
    read_listing,
    words_of,
)

_FUNCTIONS = {"sin", "cos", "tan", "log", "ln", "sqrt", "and", "or", "pi"}
_IN_TEXT = re.compile(r"\\text[a-z]*\s*\{[^{}]*\}|\\math[a-z]*\s*\{[^{}]*\}")


class Mark(NamedTuple):
    """An answer that the text itself marks as one: where the mark stands, and what it marks."""

    place: int
    content: str
    is_tag: bool = False


_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_HASHES = re.compile(r"(?<![#\\])####(?!#)[ \t]*(.*(?:\n[ \t]*\S.*)?)")
_HEADING = re.compile(r"\d+(?:\s*[.):]\s+\S|\s+[A-Z])")
_PHRASE = re.compile(
    r"(?:\b(?:(?:final\s+)?answers?|correct (?:choice|option))\b(?:(?!\banswer)[^\n.:=$\\]){0,60}?"
    r"(?:\b(?:is|are|be|was)\b(?!\s+not\b)\s*:?|[:：=])|(?:答案|答)\s*(?:是|为|[:：]))[ \t]*(?:\*\*|__)?[ \t]*",
    re.IGNORECASE,
)
_MATH = re.compile(
    r"(?<!\\)\$\$(?P<display>.{,999}?)(?<!\\)\$\$|(?<![\\\d])\$(?![\s$])(?P<inline>(?:\\.|[^$\n\\])+?)(?<![\s\\])\$(?!\d)"
    r"|\\\((?P<parenthesis>.{,999}?)\\\)|\\\[(?P<bracket>.{,999}?)\\\]",
    re.DOTALL,
)
_EMPHASIS = re.compile(r"(?<![\w)\]}*])\*\*(?=[^\s*])([^\n]{,200}?)(?<=[^\s*])\*\*(?![\w*])|(?<!`)`([^`\n]*)`(?!`)")
MAX_TAG_WORDS = 3
"""Words of an answer in ``<answer>`` that are not a sentence."""
MAX_END = 4000
"""Characters at the end of a text in which an answer that is not marked is looked for."""
_CONNECTOR = re.compile(r"\s*(?:,\s*(?:and|or)?|and|or)\s*")


def find_mark(text: str) -> Mark | None:
    """The last answer that is marked as one: by a box, by ``#### `` as in GSM8K, or by ``<answer>``.

    An empty box marks an answer too: that there is none.
    """
    marks = [*_boxes(text), *_hashes(text)]
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    if start >= 0 and not _BOX.search(text, start, end):
        marks.append(Mark(start, text[start + len("<answer>") : end], True))
    return max(marks, default=None)


def find_answer(text: str) -> Answer | None:
    """What a completion gives as its answer.

    The last mark, or else what follows the last "answer is" or "Answer:", or else the whole text where it is nothing
    but an answer, or else its last formula or number.
    """
    _, _, text = text.rpartition("</think>")
    mark = find_mark(text)
    if mark is not None:
        return _read_tag(mark.content) if mark.is_tag else read_answer(mark.content)
    return _find_unmarked(text)


def _read_tag(text: str) -> Answer | None:
    """What stands in ``<answer>``: an answer, a sentence with one, or a few words."""
    whole = read_answer(text)
    is_answer = isinstance(whole, Text) and len(text.split()) <= MAX_TAG_WORDS and not _PHRASE.search(text)
    return whole if is_answer else _find_unmarked(text)


def _find_unmarked(text: str) -> Answer | None:
    text = re.sub(r"^\s*#+\s+", "", _EMPHASIS.sub(r"\1\2", text[-MAX_END:]), flags=re.MULTILINE)
    phrases = list(_PHRASE.finditer(text))
    for phrase in reversed(phrases):
        answer = _read_phrase(text[phrase.end() :])
        if answer is not None:
            return answer
    whole = None if "\n" in text.strip() else read_answer(text)
    if whole is not None and not isinstance(whole, Text) and not _is_prose(text, whole):
        return whole
    choice = re.fullmatch(r"\s*(?:option|choice)\s+(\(?[A-J]\)?)\.?\s*", text, re.IGNORECASE)
    return read_answer(choice[1]) if choice else _last_value(text) or whole


def _boxes(text: str) -> list[Mark]:
    boxes = []
    end = 0
    for match in _BOX.finditer(text):
        if match.start() < end:  # inside of another one
            continue
        if text.startswith("{", match.end()):
            closing = closing_brace(text, match.end())
            end = len(text) if closing is None else closing
            # A box that the token limit has cut holds no answer: 7 may be the beginning of 73.
            boxes.append(Mark(match.start(), "" if closing is None else text[match.end() + 1 : closing]))
        else:
            bare = re.match(r"[\w.,/-]+", text[match.end() :])
            boxes.append(Mark(match.start(), bare[0].rstrip(".,") if bare else ""))
    return boxes


def _hashes(text: str) -> list[Mark]:
    """The last line that ``####`` marks as an answer; Markdown headings of that level are none."""
    lines = list(_HASHES.finditer(text))
    phrase_end = max((match.end() for match in _PHRASE.finditer(text)), default=0) if lines else 0
    for match in reversed(lines):
        line, _, following = (part.strip() for part in match[1].partition("\n"))
        content = line or following
        if _HEADING.match(content) or _PHRASE.search(content):
            continue
        value = _leading_value(normalize(content))
        is_last = not text[match.end() :].strip() and not (line and following)
        if is_last and (value is not None or not _BOX.search(content)):
            return [Mark(match.start(), value or content)]
        if value is not None:
            is_bare = re.fullmatch(r"\W*", normalize(content)[len(value) :]) and not words_of(value)
            if is_bare or phrase_end <= match.end():
                return [Mark(match.start(), value)]
    return []


def _leading_value(text: str) -> str | None:
    """The number at the start of a normalised text with its unit, if only words follow it."""
    if read_number(text) is not None:
        return text
    match = re.match(r"\\?[$€£¥₹]?\s*", text)
    start = match.end() if match else 0
    number = NUMBER.match(text, start)
    if number is None or (
        number.end() < len(text)
        and re.match(
            r"[\w^_*+=<>\\-]|\s*[-+*=<>\\^]|\s*/(?![a-zA-Z]{2})|\s*\((?![a-zA-Z]{2})|\s*(?:,|or\b|and\b)\s*-?\d",
            text[number.end() :],
        )
    ):
        return None
    return text[: number.end()]


def _read_phrase(text: str) -> Answer | None:
    """What follows "the answer is", up to the end of the line or sentence."""
    lines = [line for line in text.split("\n") if line.strip(" \t*_#>-")]
    if not lines:
        return None
    line = text.lstrip() if re.match(r"\s*(?:\$\$|\\\[)", text) else lines[0].strip()
    math = _MATH.search(line)
    if math and not re.search(
        r"\w", re.sub(r"\b(?:either|approximately|about|equal|to|simply|just)\b", "", line[: math.start()])
    ):
        return _joined_math(line, math)
    line = lines[0].strip()
    sentence = re.split(r"(?<=[^\s.])[.!?。](?=\s|$|\*)|\s+(?:because|since|which|as|where)\s", line, maxsplit=1)[
        0
    ].strip(" *_`")
    sentence = re.sub(
        r"^(?:therefore|thus|so|approximately|about|simply|just|equal to|exactly|option|choice)\s+",
        "",
        sentence,
        flags=re.IGNORECASE,
    )
    sentence = sentence.replace("**", "").replace("`", "")
    whole = read_answer(sentence)
    if whole is not None and not isinstance(whole, Text) and not _is_prose(sentence, whole):
        return whole
    if isinstance(whole, Text) and re.fullmatch(r"[\d:]+ [ap]m", whole.words):
        return whole
    value = _leading_value(normalize(sentence))
    if value is not None:
        return read_answer(value)
    choice = re.match(r"\(?([A-J])\)?[.:)]?(?:\s|$|[,;])", sentence)
    if choice:
        return read_answer(f"({choice[1]})")
    return whole if isinstance(whole, Text) and not re.search(r"\d", sentence) else _last_value(sentence) or whole


def _joined_math(text: str, first: re.Match[str]) -> Answer | None:
    """A formula, with those that "and" or commas join to it."""
    parts = [_content(first)]
    end = first.end()
    while True:
        connector = _CONNECTOR.match(text, end)
        following = _MATH.match(text, connector.end()) if connector else None
        if following is None:
            percent = re.match(r"\s*(?:\\?%|percent)", text[end:])
            if percent and len(parts) == 1:
                parts = [parts[0] + r"\%"]
            return read_answer(parts[0]) if len(parts) == 1 else read_listing(parts)
        parts.append(_content(following))
        end = following.end()


def _content(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None)


# What is not marked

_POINT = re.compile(r"[(\[][^()\[\]a-zA-Z]*,(?!\d{3})[^()\[\]a-zA-Z]*[)\]]")
_NUMBER_START = re.compile(r"(?<![\w.])(?!(?<=\d,)\d{3})[-+]?\.?\d")
_OPERAND = (
    r"(?:\\[a-zA-Z]+(?:\{[^{}]*\})*|[\d.,]*\d(?:[eE][+-]?\d+)?[a-zA-Z]?(?![a-zA-Z])"
    r"|(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z])|(?:sqrt|sin|cos|tan|log|ln)?\([^()]*\))"
)
_SIGN = r"\s*(?:[-+*/^=]|\*\*|\\times|\\cdot)\s*"
_RUN = re.compile(rf"-?\s?{_OPERAND}(?:\s?(?:(?<=\d) )?{_OPERAND})*(?:{_SIGN}-?{_OPERAND}(?:{_OPERAND})*)*")


def _last_value(text: str) -> Answer | None:
    """The last formula between dollars, or the last number, whichever comes later."""
    math = None
    for match in _MATH.finditer(text):
        math = match
    first = math
    if math is not None:
        joined = [math]
        for match in reversed(list(_MATH.finditer(text, 0, math.start()))):
            if not _CONNECTOR.fullmatch(text[match.end() : joined[0].start()]):
                break
            joined.insert(0, match)
        first = joined[0]
    tail = text[math.end() :] if math is not None else text
    number = _last_number(tail)
    if number is not None:
        return number
    return _joined_math(text, first) if first is not None else None


def _last_number(text: str) -> Answer | None:
    """The last number of a plain text, with what belongs to it: a formula that it is a part of counts as a whole."""
    plain = re.sub(r"<[^<>\d]*>|[*]{2}|`", " ", normalize(text))
    points = list(_POINT.finditer(plain))
    plain = re.sub(r"(?<=\w)[,.](?=\s|$)", " ", plain)  # of the same length
    for match in reversed(list(_NUMBER_START.finditer(plain))):
        point = next((p for p in points if p.start() < match.start() < p.end()), None)
        if point is not None:
            return read_answer(point[0])
        answer = _read_run(plain[_start_of_run(plain, match.start()) :])
        if answer is not None:
            return answer
    return None


def _start_of_run(text: str, place: int) -> int:
    """Where the formula begins that the number at ``place`` belongs to."""
    left = re.search(
        r"(?:(?:(?<![\w\\])[a-zA-Z]|(?<![\w\\])\\?(?:sqrt|sin|cos|tan|log|ln)|[\w.,]*\d[a-zA-Z]?|\([^()]*\)|\\[a-zA-Z]+(?:\{[^{}]*\})*)?"
        r"(?:\s*(?:\*\*|\\times|\\cdot|[-+*/^=])\s*|\(|\s(?=\d+/\d)|[$€£¥₹]|\{))+[-+]?$",
        text[:place],
    )
    if left and left.start() < place:
        return _start_of_run(text, left.start())
    factor = re.search(r"[\d.]+$" if text.startswith("\\", place) else r"(?<!\d)\d+ $", text[:place])
    is_factor = factor and (text.startswith("\\", place) or re.match(r"\d+\s*/\s*\d", text[place:]))
    return factor.start() if factor and is_factor else place


def _read_run(text: str) -> Answer | None:
    """The answer at the start of ``text``: the longest beginning that is a number or a formula."""
    text = text.strip().removeprefix("=").lstrip()
    value = _leading_value(text)
    if value is not None:
        unit = UNIT.match(text, len(value))
        whole = read_answer(text[: unit.end()]) if unit is not None else None
        return whole if isinstance(whole, Number) else read_answer(value)
    run = _RUN.match(text)
    if run is None:
        return None
    return read_answer(run[0].strip(" ,;:"))


def _is_prose(text: str, answer: Answer) -> bool:
    """Whether a text has words beside its answer, so that it is not the answer as a whole."""
    if isinstance(answer, Number | Choice):
        return False
    words = [word for word in words_of(_IN_TEXT.sub("", text)) if word.lower() not in _FUNCTIONS]
    if isinstance(answer, Listing) and isinstance(answer.items[0], Text):
        is_words = all(isinstance(item, Text) for item in answer.items) or re.fullmatch(
            r"[A-Z]\w* \d+", answer.items[0].words
        )
        return not is_words or len(words) > MAX_TAG_WORDS
    return bool(words)
