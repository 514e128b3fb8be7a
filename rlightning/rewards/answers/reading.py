"""Parses a whole text to an answer of one of the kinds."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from rlightning.rewards.answers.kinds import Answer, Based, Choice, Congruence, Formula, Ratio, Relation, Text
from rlightning.rewards.answers.notation import normalize, split_top_level
from rlightning.rewards.answers.numbers import Number, read_number
from rlightning.rewards.answers.structures import READERS, join, read_group
from rlightning.rewards.answers.units import canonical_unit

MAX_WORDS = 12
"""Maximum number of words of an answer; a longer text is prose."""
MAX_LENGTH = 2000
"""Maximum number of characters of an answer."""


_LEAD_IN = re.compile(
    r"(?:^\\text\s*\{[^{}]*\b(?:is|are|answer|option|choice)\s*:?\s*\}|^=|^\\approx(?![a-zA-Z])"
    r"|^(?:the\s+)?(?:correct\s+)?(?:option|choice|answer|letter)\b(?:\s+is)?\s*:?\s*(?=\(?[A-J]\)?(?![a-zA-Z])))",
    re.IGNORECASE,
)
CONDITION = re.compile(
    r"(?<=\S)\s*[,;]?\s*(?:\\text\s*\{\s*)?[,;(]?\s*(?:\\forall(?![a-zA-Z])"
    r"|\b(?:for\s+(?:all|any|every|each|some|integers?|\}?\s*[a-zA-Z]\s*\\in)|where)\b.*"
    r"|\(\s*[a-zA-Z]\s*\\in\s*\\mathbb\{[ZN]\}[^()]*\)).*$",
    re.DOTALL,
)
"""Pattern of the range of a formula's variables at its end, which is not part of the answer."""
_SIGNS = {
    "=": "=",
    "<": "<",
    ">": ">",
    "\\le": "<=",
    "\\ge": ">=",
    "\\ne": "!=",
    "\\in": "in",
    "\\approx": "~",
    "\\equiv": "=",
}
_SIGN = re.compile(r"\s*(\\(?:le|ge|ne|in|approx|equiv)(?![a-zA-Z])|[=<>])\s*")
_CHOICE = re.compile(
    r"(?:\\text\s*\{\s*)?(?:\(([A-J])\s*\)|([A-J])(?:\)|[.:](?=\s)|(?=\s*\}|$)))(?:\s*\})?\s*(.*)", re.DOTALL
)
_BASED = re.compile(r"\(?([0-9A-F]+|[0-9a-f]{2,})\)?\s*_\s*\{?\s*\(?(\d+|[a-z]{3,})\)?\s*\}?")
_BASES = {
    name: base
    for base, name in enumerate(
        ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"), start=2
    )
} | {"sixteen": 16}
_CONGRUENCE = re.compile(r"(?:[a-zA-Z]\s*(?:=|\\equiv(?![a-zA-Z]))\s*)?(.*?[^\s,])\s*,?\s*\\pmod\{(\w+)\}")
_TIME_OF_DAY = re.compile(r"(\d{1,2}(?::[0-5]\d)?)\s*(?:\\text\s*\{\s*)?([aApP])\.?\s?[mM]\.?(?:\s*\})?")
_CLOCK = re.compile(r"\d{1,2}:[0-5]\d")
_COMMAND = re.compile(r"\\(?:begin|end)\s*\{[^{}]*\}|\\[a-zA-Z]+")
_WORD = re.compile(r"[a-zA-Z]{2,}")
_WHOLE_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_TRAILING_UNIT = re.compile(r"(?:\s*\\text\s*\{[^{}]*\}\s*(?:\^\s*(?:\{\s*-?\d\s*\}|-?\d))?)+$")
_FUNCTION_WORDS = re.compile(r"\\[a-zA-Z]+|\b(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|max|min|mod)\b")
_WORDS = re.compile(r"[\w\s.,:'()&/%$-]*[a-zA-Z]{2,}[\w\s.,:'()&/%$!?-]*")


def read_answer(text: str) -> Answer | None:
    """Parse the whole of ``text`` as one answer; None if it contains none, or is prose.

    Only units and delimiters may be left out.
    """
    if len(text) > MAX_LENGTH:
        return None
    text = normalize(text)
    return _read(text) if len(words_of(text)) <= MAX_WORDS else None


def words_of(text: str) -> list[str]:
    """Return the words of two or more letters in a normalised text, outside of its formulas."""
    return _WORD.findall(_COMMAND.sub(" ", text))


def read_listing(texts: list[str]) -> Answer | None:
    """Parse several answers that stand next to each other as one list."""
    answers = [read_answer(text) for text in texts]
    if any(answer is None for answer in answers):
        return None
    return join([answer for answer in answers if answer is not None])


def _read(text: str) -> Answer | None:
    text = _LEAD_IN.sub("", text, count=1).strip()
    text = CONDITION.sub("", text, count=1).strip() or text
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
        small = re.fullmatch(r"([a-j])\)", text)
        return Choice(small[1].upper()) if small else None
    rest = match[3].strip()
    if rest and not match[1] and _SIGN.match(rest):
        return None
    if match[1] and rest and re.match(r"[_^,;+*/=<>-]|\\(?:le|ge|cup|cap|in|cdot|times)", rest):
        return None
    return Choice(match[1] or match[2], _read(normalize(rest)) if rest else None)


def _based(text: str) -> Based | None:
    match = _BASED.fullmatch(re.sub(r"\\text\s*\{\s*(?:base\s*)?(\w*)\s*\}", r"\1", text).replace(" ", ""))
    if match is None:
        return None
    base = int(match[2]) if match[2].isdigit() else _BASES.get(match[2], 0)
    is_number = 2 <= base <= 36 and all(int(digit, 36) < base for digit in match[1])
    return Based(match[1].upper().lstrip("0") or "0", base) if is_number else None


def _congruence(text: str) -> Congruence | None:
    match = _CONGRUENCE.fullmatch(text)
    residue = _read(match[1]) if match else None
    return Congruence(residue, match[2]) if match and residue is not None else None


def _relation(text: str) -> Answer | None:
    pieces = split_top_level(text, _SIGN)
    if len(pieces) < 3:
        return None
    signs = [_SIGNS[sign] for sign in pieces[1::2]]
    sides = [side.strip() for side in pieces[::2]]
    if not all(sides):
        return None
    return Relation(tuple(signs), tuple(sides))


def _ratio(text: str) -> Answer | None:
    time = _TIME_OF_DAY.fullmatch(text)
    if time:
        return Text(f"{time[1]}{':00' if ':' not in time[1] else ''} {time[2].lower()}m")
    parts = re.split(r"\s*(?::|\\colon(?![a-zA-Z])|\\text\s*\{\s*to\s*\}|\sto\s)\s*", text)
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
    """Parse a text that is of no other kind as a formula, with or without a unit."""
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
    _congruence,
    *(partial(reader, read=_read) for reader in READERS),
    _relation,
    partial(read_group, read=_read),
    _ratio,
    _text,
]
