"""An answer as a whole: which kind of answer a text is, and its parts."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from rlightning.rewards.answers.notation import bracketed, normalize, split_top_level
from rlightning.rewards.answers.numbers import Number, read_number
from rlightning.rewards.answers.units import canonical_unit

MAX_WORDS = 12
"""A text with more words is prose, and no answer."""
MAX_LENGTH = 2000
"""Characters of an answer."""


@dataclass(frozen=True, slots=True)
class Formula:
    """Anything in LaTeX that has a value, or that can only be compared as it is written.

    Attributes:
        latex: the text without a unit at its end.
        unit: the canonical name of a unit that is known, or "".
    """

    latex: str
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """Words, compared without regard to case and punctuation."""

    words: str


@dataclass(frozen=True, slots=True)
class Choice:
    """A letter of a multiple choice, and what the answer says beside it."""

    letter: str
    rest: "Answer | None" = None


@dataclass(frozen=True, slots=True)
class Listing:
    """Answers with commas, "and" or "or" between them, and no bracket around them: in any order."""

    items: tuple["Answer", ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Answers in brackets: a point, a tuple, an interval, and, in braces, a set."""

    opening: str
    items: tuple["Answer", ...]
    closing: str


@dataclass(frozen=True, slots=True)
class Union:
    """Intervals and sets together."""

    parts: tuple["Answer", ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Cells by rows; all kinds of brackets are alike."""

    rows: tuple[tuple["Answer", ...], ...]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Numbers with colons between them."""

    terms: tuple["Answer", ...]
    is_clock_time: bool


@dataclass(frozen=True, slots=True)
class Based:
    """Digits of a number with its base, such as ``101_2``."""

    digits: str
    base: int


@dataclass(frozen=True, slots=True)
class Relation:
    """Equations and inequalities, also chained: ``sides`` with ``signs`` between them.

    Attributes:
        signs: each one of ``= < > <= >= != in ~``.
        sides: one more than signs; texts.
    """

    signs: tuple[str, ...]
    sides: tuple[str, ...]


Answer = Number | Formula | Text | Choice | Listing | Group | Union | Matrix | Ratio | Based | Relation

_LIST_SEPARATOR = re.compile(
    r"\s*(?!(?<=\d),\d{3}(?!\d))(?:[,;]\s*(?:\\text\s*\{\s*)?(?:(?:and|or)\b)?(?:\s*\})?|\\text\s*\{\s*,?\s*(?:and|or)\s*,?\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))\s*"
)
_UNION = re.compile(r"\s*\\cup(?![a-zA-Z])\s*")
_SIGNS = {"=": "=", "<": "<", ">": ">", "\\le": "<=", "\\ge": ">=", "\\ne": "!=", "\\in": "in", "\\approx": "~"}
_SIGN = re.compile(r"\s*(\\(?:le|ge|ne|in|approx)(?![a-zA-Z])|[=<>])\s*")
_CHOICE = re.compile(
    r"(?:\\text\s*\{\s*)?(?:\(([A-J])\s*\)|([A-J])(?:\)|[.:](?=\s)|(?=\s*\}|$)))(?:\s*\})?\s*(.*)", re.DOTALL
)
_MATRIX = re.compile(
    r"[(\[]?\s*\\begin\s*\{(?:[pb]?matrix|smallmatrix|array)\}(?:\s*\{[lcr|\s]*\})?((?:(?!\\begin|\\end).)*)"
    r"\\end\s*\{(?:[pb]?matrix|smallmatrix|array)\}\s*[)\]]?",
    re.DOTALL,
)
_BASED = re.compile(r"([0-9A-F]+)\s*_\s*(?:\{\s*(\d+)\s*\}|(\d+))")
_TIME_OF_DAY = re.compile(r"(\d{1,2}(?::[0-5]\d)?)\s*(?:\\text\s*\{\s*)?([aApP])\.?\s?[mM]\.?(?:\s*\})?")
_CLOCK = re.compile(r"\d{1,2}:[0-5]\d")
_COMMAND = re.compile(r"\\(?:begin|end)\s*\{[^{}]*\}|\\[a-zA-Z]+")
_WORD = re.compile(r"[a-zA-Z]{2,}")
_WHOLE_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_TRAILING_UNIT = re.compile(r"(?:\s*\\text\s*\{[^{}]*\}\s*(?:\^\s*(?:\{\s*-?\d\s*\}|-?\d))?)+$")
_FUNCTION_WORDS = re.compile(r"\\[a-zA-Z]+|\b(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|max|min|mod)\b")
_WORDS = re.compile(r"[\w\s.,:'()&/%$-]*[a-zA-Z]{2,}[\w\s.,:'()&/%$!?-]*")


def read_answer(text: str) -> Answer | None:
    """Read the whole of ``text`` as one answer; None where it holds none, or is prose.

    No part of it is left out but units and delimiters.
    """
    if len(text) > MAX_LENGTH:
        return None
    text = normalize(text)
    return _read(text) if len(words_of(text)) <= MAX_WORDS else None


def words_of(text: str) -> list[str]:
    """The words of two letters and more that stand in a normalised text beside its formulas."""
    return _WORD.findall(_COMMAND.sub(" ", text))


def is_time_of_day(answer: Answer | None) -> bool:
    """Whether the answer is a time such as ``3:00 pm``."""
    return isinstance(answer, Text) and re.fullmatch(r"\d{1,2}:\d\d [ap]m", answer.words) is not None


def read_listing(texts: list[str]) -> Answer | None:
    """Read several answers that stand beside each other as one list."""
    answers = [read_answer(text) for text in texts]
    if any(answer is None for answer in answers):
        return None
    return _join([answer for answer in answers if answer is not None])


def _read(text: str) -> Answer | None:
    text = text.removeprefix("=").lstrip()
    whole_text = _WHOLE_TEXT.fullmatch(text)
    if whole_text:
        return _read(normalize(whole_text[1])) if whole_text[1].strip() else None
    if not any(character.isalnum() for character in text) and "\\" not in text:
        return None
    for reader in _READERS:
        answer = reader(text)
        if answer is not None:
            return answer
    return _formula(text)


def _choice(text: str) -> Choice | None:
    match = _CHOICE.fullmatch(text)
    if match is None:
        return None
    rest = match[3].strip()
    if rest and not match[1] and _SIGN.match(rest):
        return None
    if match[1] and rest and re.match(r"[_^,;+*/=<>-]|\\(?:le|ge|cup|cap|in|cdot|times)", rest):
        return None
    return Choice(match[1] or match[2], _read(normalize(rest)) if rest else None)


def _based(text: str) -> Based | None:
    match = _BASED.fullmatch(re.sub(r"\\text\s*\{\s*(?:base\s*)?(\w+)\s*\}", r"\1", text))
    if match is None:
        return None
    base = int(match[2] or match[3])
    is_number = 2 <= base <= 36 and all(int(digit, 36) < base for digit in match[1])
    return Based(match[1].lstrip("0") or "0", base) if is_number else None


def _listing(text: str) -> Answer | None:
    parts = [part.strip() for part in split_top_level(text, _LIST_SEPARATOR)]
    if len(parts) < 2:
        return None
    answers = [_read(normalize(part)) for part in parts if part]
    if not answers or any(answer is None for answer in answers):
        return None
    return _join([answer for answer in answers if answer is not None])


def _join(answers: list[Answer]) -> Answer:
    """One list of what may be lists themselves, such as the two values of a plus-minus sign."""
    items: list[Answer] = []
    for answer in answers:
        items += answer.items if isinstance(answer, Listing) else [answer]
    return Listing(tuple(items)) if len(items) > 1 else items[0]


def _plus_minus(text: str) -> Answer | None:
    if not re.search(r"\\(?:pm|mp)(?![a-zA-Z])", text):
        return None
    name, equals, value = text.partition("=")
    if equals and not re.search(r"\\(?:pm|mp)(?![a-zA-Z])", name):
        text = value
    else:
        name = ""
    both = []
    for plus, minus in (("+", "-"), ("-", "+")):
        one = re.sub(r"\\mp(?![a-zA-Z])", minus, re.sub(r"\\pm(?![a-zA-Z])", plus, text)).strip().removeprefix("+")
        both.append(_read(normalize(f"{name}={one}" if name else one)))
    return _join([answer for answer in both if answer is not None]) if None not in both else None


def _union(text: str) -> Answer | None:
    parts = split_top_level(text, _UNION)
    if len(parts) < 2:
        return None
    parts[0] = re.sub(r"^[a-zA-Z]\s*\\in\s*", "", parts[0])
    answers = tuple(answer for answer in map(_read, parts) if answer is not None)
    return Union(answers) if len(answers) == len(parts) else None


def _relation(text: str) -> Answer | None:
    pieces = split_top_level(text, _SIGN)
    if len(pieces) < 3:
        return None
    signs = [_SIGNS[sign] for sign in pieces[1::2]]
    sides = [side.strip() for side in pieces[::2]]
    if not all(sides):
        return None
    return Relation(tuple(signs), tuple(sides))


def _group(text: str) -> Answer | None:
    inside = bracketed(text)
    if inside is None:
        return None
    opening, content, closing = inside
    parts = [part.strip() for part in split_top_level(content, re.compile(r"\s*[,;]\s*"))]
    if opening == r"\{" and not content.strip():
        return Formula(r"\emptyset")
    items = tuple(answer for answer in map(_read, map(normalize, parts)) if answer is not None)
    if len(items) != len(parts):
        return None
    if opening == r"\{":
        joined = _join(list(items))
        return Group(opening, joined.items if isinstance(joined, Listing) else (joined,), closing)
    if len(items) == 1:
        return items[0] if (opening, closing) in (("(", ")"), ("[", "]")) else None
    return Group(opening, items, closing)


def _matrix(text: str) -> Matrix | None:
    match = _MATRIX.fullmatch(text)
    if match is None:
        return None
    lines = [line for line in re.split(r"\\\\(?:\[[^\]]*\])?", match[1].replace(r"\hline", "")) if line.strip()]
    rows = [[_read(normalize(cell)) for cell in re.split(r"(?<!\\)&", line)] for line in lines]
    if not rows or any(cell is None or len(row) != len(rows[0]) for row in rows for cell in row):
        return None
    return Matrix(tuple(tuple(cell for cell in row if cell is not None) for row in rows))


def _ratio(text: str) -> Answer | None:
    time = _TIME_OF_DAY.fullmatch(text)
    if time:
        return Text(f"{time[1]}{':00' if ':' not in time[1] else ''} {time[2].lower()}m")
    parts = re.split(r"\s*(?::|\\colon(?![a-zA-Z]))\s*", text)
    if len(parts) < 2:
        return None
    terms = tuple(answer for answer in map(_read, parts) if isinstance(answer, Number | Formula))
    return Ratio(terms, _CLOCK.fullmatch(text) is not None) if len(terms) == len(parts) else None


def _text(text: str) -> Text | None:
    plain = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text).replace("\\%", "%").replace("\\$", "$")
    words = " ".join(plain.split())
    is_text = "\\" not in words and _WORDS.fullmatch(_FUNCTION_WORDS.sub("", words)) is not None
    if not is_text or re.fullmatch(r"\(?[a-z]\s*[-+*/].*", words):
        return None
    return Text(words)


def _formula(text: str) -> Answer | None:
    """What is left is a formula, with or without a unit."""
    bare = _TRAILING_UNIT.sub("", text).strip()
    if bare and bare != text and not bare.endswith(("^", "_", "+", "-", "=", ",")):
        return _with_unit(_read(bare), text[len(bare) :])
    degrees = re.fullmatch(r"(.*?[^\s^])\s*(\^\s*\\circ)", text)
    if degrees and not re.search(r"\\(?:circ|sin|cos|tan|cot|sec|csc)(?![a-zA-Z])", degrees[1]):
        return _with_unit(_read(degrees[1]), degrees[2])
    percent = re.fullmatch(r"(.+?)\s*\\?%", text)
    if percent and not re.search(r"[%]", percent[1]):
        return Formula(rf"\frac{{{percent[1]}}}{{100}}")
    return Formula(text)


def _with_unit(answer: Answer | None, unit: str) -> Answer | None:
    return replace(answer, unit=canonical_unit(unit)) if isinstance(answer, Number | Formula) else answer


_READERS: list[Callable[[str], Answer | None]] = [
    read_number,
    _based,
    _choice,
    _matrix,
    _listing,
    _plus_minus,
    _union,
    _relation,
    _group,
    _ratio,
    _text,
]
