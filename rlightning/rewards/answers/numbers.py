"""Parses numbers: decimals, thousands separators, fractions, scientific notation, percent, units."""

import re
from dataclasses import dataclass
from fractions import Fraction

from rlightning.rewards.answers.units import canonical_unit, units_differ

RELATIVE_TOLERANCE = Fraction(1, 10**6)
"""Maximum relative difference between a decimal and the number that it rounds."""
MAX_EXPONENT = 1000
"""Largest power of ten that is parsed as a number."""

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d{1,3}(?: \d{3})+(?:\.\d+)?(?![\d/])|\d+(?:\.\d*)?|\.\d+)"
_POWER = r"(?:[eE][+-]?\d+|\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*(?:\{\s*[+-]?\d+\s*\}|[+-]?\d+))"
NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s*(?:"
    rf"(?P<whole>\d+)\s+(?P<over>\d+)\s*/\s*(?P<under>\d+)(?![\d.])"
    rf"|(?P<mixed>\d*)\s*\\frac\s*(?P<top>\{{\s*-?\d+\s*\}}|\d)\s*(?P<bottom>\{{\s*\d+\s*\}}|\d)"
    rf"|(?P<repeating>\d*\.\d*)\\(?:overline|bar)\s*\{{(?P<period>\d+)\}}"
    rf"|(?P<digits>{_DIGITS})(?P<power>{_POWER})?(?:\s*/\s*(?P<denominator>\d+(?:,\d{{3}})*)(?![\d.]))?"
    rf")"
)
_CURRENCY = "$€£¥₹"
_BEFORE = re.compile(
    rf"(?P<sign>[+-]?)\s*\\?(?P<currency>[{_CURRENCY}]|(?:US|A|C)\\?\$|Rs\.?|\\pounds|\\text\{{\s*\\?\$\s*\}})\s*"
)
_PERCENT = re.compile(r"\s*(?:\\?%|(?:\\text\{\s*)?(?:\\?%|percent|per cent|pct)(?:\s*\})?)\s*")
_TEXT_UNIT = r"\s*\\text\s*\{[^{}\d]*\}\s*(?:\^\s*(?:\{\s*-?\d\s*\}|-?\d))?"
_POWER_SIGN = r"(?:\^\{?\d\}?)?"
UNIT = re.compile(
    rf"(?:{_TEXT_UNIT}\s*/?)+|\s*\^\s*\\circ\s*(?:(?:\\text\{{\s*)?[CFK](?:\s*\}})?)?|\s*\\?[{_CURRENCY}¢]"
    rf"|\s*/?\s*[a-zA-Z]{{2,}}\.?(?:\^\{{?\d\}}?|\s*/\s*[a-zA-Z]+\.?{_POWER_SIGN})?(?:[ -]+[a-zA-Z][a-zA-Z.'-]*)*"
    rf"|\s+[mgshLN]{_POWER_SIGN}"
)
_NOT_UNITS = frozenset(
    {"and", "or", "if", "is", "for", "when", "than", "to", "am", "pm", "less", "fewer", "minus", "plus"}
) | {*("pi", "sqrt", "sin", "cos", "tan", "log", "ln", "mod", "factorial")}
_SCALES = {
    "hundred": Fraction(100),
    "thousand": Fraction(1000),
    "million": Fraction(10**6),
    "billion": Fraction(10**9),
    "trillion": Fraction(10**12),
    "dozen": Fraction(12),
    "half": Fraction(1, 2),
    "halve": Fraction(1, 2),
} | {
    name: Fraction(1, place + 3)
    for place, name in enumerate(("third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"))
}
_SCALE = re.compile(rf"(?:\s|-|\\text\s*\{{\s*)*({'|'.join(sorted(_SCALES, reverse=True))})s?(?![a-z])\s*(?:of a\b)?")


@dataclass(frozen=True, slots=True)
class Number:
    """A rational number, and how it was written.

    Attributes:
        value: the exact value as written.
        last_place: one unit in the last digit of a decimal; 0 for exact numbers such as integers and fractions.
        is_percent: whether a percent sign follows, which ``value`` does not include.
        unit: the canonical name of a known unit, or "".
    """

    value: Fraction
    last_place: Fraction = Fraction(0)
    is_percent: bool = False
    unit: str = ""

    def equals(self, other: "Number") -> bool:
        """Return whether two numbers are equal up to rounding; with a percent sign, 5% also equals 5 and 0.05."""
        if units_differ(self.unit, other.unit):
            return False
        if self.is_percent == other.is_percent:
            return _is_close(self, other)
        if self.unit or other.unit:
            return False
        percent, plain = (self, other) if self.is_percent else (other, self)
        share = Number(percent.value / 100, percent.last_place / 100)
        return _is_close(percent, plain) or _is_close(share, plain)


def read_number(text: str) -> Number | None:
    """Parse a normalised text that is only a number, with its percent sign, currency or unit; else return None."""
    sign, currency = 1, ""
    before = _BEFORE.match(text)
    if before:
        sign, currency = (-1 if before["sign"] == "-" else 1), before["currency"].replace("\\text", "").strip("{} ")
        text = text[before.end() :]
    match = NUMBER.match(text)
    if match is None:
        return None
    if before and match["sign"] and before["sign"]:
        return None
    number = to_number(match)
    if number is None:
        return None
    value, last_place = sign * number.value, number.last_place
    rest = text[match.end() :]
    percent = _PERCENT.match(rest)
    if percent and (percent.end() == len(rest) or not rest[percent.end() :][0].isalnum()):
        rest = rest[percent.end() :]
        return Number(value, last_place, True) if not rest.strip() else None
    scale = _SCALE.match(rest)
    while scale:
        value, last_place = value * _SCALES[scale[1]], last_place * _SCALES[scale[1]]
        rest = rest[scale.end() :].lstrip("} ")
        scale = _SCALE.match(rest)
    unit = canonical_unit(currency)
    if rest.strip():
        match = UNIT.fullmatch(rest.rstrip())
        words = re.findall("[a-z]+", rest.lower().replace("p.m", "pm").replace("a.m", "am"))
        if match is None or {*words} & _NOT_UNITS or {*words[:1]} & {"squared", "cubed"}:
            return None
        unit = unit or canonical_unit(rest)
    return Number(value, last_place, unit=unit)


def to_number(match: re.Match[str]) -> Number | None:
    """Convert a match of :data:`NUMBER` to a number; None for a division by 0 or a number of too many digits."""
    sign = -1 if match["sign"] == "-" else 1
    try:
        if match["whole"]:
            value, last_place = int(match["whole"]) + Fraction(int(match["over"]), int(match["under"])), Fraction(0)
        elif match["top"]:
            fraction = Fraction(int(match["top"].strip("{} ")), int(match["bottom"].strip("{} ")))
            value, last_place = int(match["mixed"] or 0) + fraction, Fraction(0)
        elif match["period"]:
            value, last_place = _repeating(match["repeating"], match["period"]), Fraction(0)
        else:
            value, last_place = _decimal(match["digits"], match["power"])
            if match["denominator"]:
                value /= int(match["denominator"].replace(",", ""))
                last_place = Fraction(0)
    except (ZeroDivisionError, OverflowError):
        return None
    return Number(sign * value, last_place)


def _decimal(digits: str, power: str | None) -> tuple[Fraction, Fraction]:
    digits = digits.replace(",", "").replace(" ", "")
    whole, _, decimals = digits.partition(".")
    exponent = 0
    if power:
        exponent = int(re.sub(r".*?10\s*\^|[eE{}\s]", "", power))
        if abs(exponent) > MAX_EXPONENT:
            raise OverflowError
    scale = Fraction(10) ** exponent
    decimals = decimals.rstrip("0")
    value = Fraction(int((whole or "0") + decimals), 10 ** len(decimals)) * scale
    is_exact = value.denominator == 1
    # Digits beyond those of a float64 have no meaning.
    return value, Fraction(0) if is_exact else max(scale / 10 ** len(decimals), abs(value) / 10**15)


def _repeating(start: str, period: str) -> Fraction:
    whole, _, decimals = start.partition(".")
    shift = 10 ** len(decimals)
    return Fraction(int((whole or "0") + decimals), shift) + Fraction(int(period), shift * (10 ** len(period) - 1))


def _is_close(one: Number, other: Number) -> bool:
    difference = abs(one.value - other.value)
    if difference == 0:
        return True
    last_place = max(one.last_place, other.last_place)
    return difference < last_place and difference <= RELATIVE_TOLERANCE * max(abs(one.value), abs(other.value))
