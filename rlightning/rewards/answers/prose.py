"""Finds the last value of a text without a marked answer: a formula in dollar signs, or a number with its unit."""

import re

from rlightning.rewards.answers.kinds import Answer, is_time_of_day
from rlightning.rewards.answers.notation import normalize, split_top_level
from rlightning.rewards.answers.numbers import UNIT, Number, read_number
from rlightning.rewards.answers.reading import read_answer, read_listing

MATH = re.compile(
    r"(?<!\\)\$\$(?P<display>.{,999}?)(?<!\\)\$\$|(?<![\\\d])\$(?![\s$])(?P<inline>(?:\\.|[^$\n\\])+?)(?<![\s\\])\$(?!\d)"
    r"|(?P<environment>\\begin\{(?P<kind>align|aligned|gather|equation)\*?\}.{,999}?\\end\{(?P=kind)\*?\})"
    r"|\\\((?P<parenthesis>.{,999}?)\\\)|\\\[(?P<bracket>.{,999}?)\\\]",
    re.DOTALL,
)
_CONNECTOR = re.compile(r"\s*(?:,\s*(?:and|or)?|and|or)\s*")

# A formula in plain text: operands with signs between them. Words may follow a number as its unit if a sign follows.
_CURRENCY = r"(?:\\?[$€£¥₹]\s?)"
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?%?"
_OPERATOR = r"\s*(?:[-+*/^=<>]|(?<=\d):(?=\d)|\\(?:times|cdot|div|le|ge|ne|approx|in|cup|pm)(?![a-zA-Z]))\s*"
_BRACKETS = r"(?:\((?:\\[a-zA-Z]+|(?![a-zA-Z]{2})[^()\n]|\([^()\n]*\))*\)|\{(?:[^{}\n]|\{[^{}\n]*\})*\}|\[[^\[\]\n]*\])"
_LETTER = r"(?<![a-zA-Z'])(?![aAI]\s[a-zA-Z]{2})[a-zA-Z](?![a-zA-Z']|\.[a-zA-Z])(?:_\w)?"
_NAME = rf"(?:\\[a-zA-Z]+|(?<![a-zA-Z])(?:sqrt|sin|cos|tan|log|ln)(?=\())(?:{_BRACKETS})*"
_OPERAND = rf"(?:{_CURRENCY}?{_DIGITS}(?:[a-zA-Z](?![a-zA-Z]))?|{_NAME}|{_BRACKETS}|{_LETTER})!*"
_UNIT_BEFORE_SIGN = rf"(?:\s?[a-zA-Z]{{2,}}){{1,3}}(?!\s[-+]\d)(?={_OPERATOR}[-+]?(?:{_CURRENCY}|[\d.(]))"
_TERM = (
    rf"[-+]?{_OPERAND}(?:(?:\s?(?=\\)|(?=[({{])|(?<=\d)\s(?=\d+/\d)|(?<![\d)]\s)){_OPERAND})*(?:{_UNIT_BEFORE_SIGN})?"
)
_RUN = re.compile(rf"(?<![\w.]){_TERM}(?:{_OPERATOR}{_TERM})*")
_GOES_ON = re.compile(r"[\w^_*+=<>\\-]|\s*(?:,|or\b|and\b)\s*-?\d")
_POINT = re.compile(r"[(\[][^()\[\]a-zA-Z]*,(?!\d{3})[^()\[\]a-zA-Z]*[)\]]")
_EQUALS = re.compile(r"\s*=\s*")


def last_value(text: str) -> Answer | None:
    """Return the last formula in dollar signs or the last number, whichever is later."""
    formulas = list(MATH.finditer(text))
    number = _last_number(text[formulas[-1].end() :] if formulas else text)
    if number is not None or not formulas:
        return number
    first = len(formulas) - 1
    while first and _CONNECTOR.fullmatch(text[formulas[first - 1].end() : formulas[first].start()]):
        first -= 1
    return joined_math(text, formulas[first])


def joined_math(text: str, first: re.Match[str]) -> Answer | None:
    """Parse a formula together with the formulas that follow it after "and" or commas."""
    parts, end = [_content(first)], first.end()
    while connector := _CONNECTOR.match(text, end):
        following = MATH.match(text, connector.end())
        if following is None:
            break
        parts.append(_content(following))
        end = following.end()
    if len(parts) > 1:
        return read_listing(parts)
    is_percent = re.match(r"\s*(?:\\?%|percent)", text[end:])
    return read_answer(parts[0] + r"\%" if is_percent else parts[0])


def leading_value(text: str) -> str | None:
    """Return the number, with its unit, at the start of a normalised text if only words follow; else None."""
    if read_number(text) is not None:
        return text
    run = _RUN.match(text)
    if run is None or not isinstance(read_number(run[0]), Number) or _GOES_ON.match(text, run.end()):
        return None
    return _with_unit(run[0], text[run.end() :])


def _content(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None)


def _last_number(text: str) -> Answer | None:
    """Return the last formula with a digit in a plain text."""
    plain = re.sub(r"<[^<>\d]*>|[*]{2}|`", " ", normalize(text))
    points = list(_POINT.finditer(plain))
    plain = re.sub(r"(?<=\w)[,.](?=\s|$)", "\n", plain)  # keeps the text's length
    for run in reversed(list(_RUN.finditer(plain))):
        if not re.search(r"\d", run[0]):
            continue
        point = next((p for p in points if p.start() <= run.start() < p.end()), None)
        answer = read_answer(point[0]) if point else _read_run(run[0], plain[run.end() :])
        if answer is not None:
            return answer
    return None


def _read_run(run: str, following: str) -> Answer | None:
    """Parse a formula; of a calculation with equals signs, only the part after the last one."""
    sides = split_top_level(run, _EQUALS)
    result = sides[-1]
    if len(sides) > 1 and _has_variables(sides[-2:], following):
        return read_answer(run)
    answer = read_answer(result)
    if isinstance(answer, Number):
        # In "84 / 12 = 7 dozen" the result is 7.
        computed = read_answer(sides[-2]) if len(sides) > 1 else None
        is_computed = isinstance(computed, Number) and computed.value == answer.value
        return answer if is_computed else read_answer(_with_unit(result, following))
    glued = re.fullmatch(r"([-+]?[\d.,]+)[a-zA-Z]", result)
    return read_answer(glued[1]) if glued and len(sides) > 1 else answer


def _with_unit(number: str, following: str) -> str:
    unit = UNIT.match(following)
    whole = number + unit[0] if unit else number
    read = read_answer(whole)
    return whole if isinstance(read, Number) or is_time_of_day(read) else number


def _has_variables(sides: list[str], following: str) -> bool:
    """Return whether letters are variables; in ``60g * 2/3 = 40 grams`` the ``g`` is a unit."""
    *_, result = sides
    unit = re.search(r"\d([a-zA-Z])$", result) or re.match(r"\s*([a-zA-Z])[a-zA-Z]", following)
    text = re.sub(rf"(?<=\d){unit[1]}(?![a-zA-Z])", "", "=".join(sides)) if unit else "=".join(sides)
    text = re.sub(r"([a-zA-Z])(\s*/\s*[\d.]+)\1(?![a-zA-Z])", r"\2", text)  # 400g / 200g
    return re.search(r"(?<![a-zA-Z'\\])[a-zA-Z](?![a-zA-Z'])|\\(?!times|cdot|div|frac|sqrt|pi)[a-z]", text) is not None
