"""The kinds of parsed answers, and their parts."""

import re
from dataclasses import dataclass

from rlightning.rewards.answers.numbers import Number


@dataclass(frozen=True, slots=True)
class Formula:
    """A formula in LaTeX, which is compared by its value or, without one, as text.

    Attributes:
        latex: the text without a unit at its end.
        unit: the canonical name of a known unit, or "".
    """

    latex: str
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """Words, compared without their case and punctuation."""

    words: str


@dataclass(frozen=True, slots=True)
class Choice:
    """A letter of a multiple choice question, and the text after it, if any."""

    letter: str
    rest: "Answer | None" = None


@dataclass(frozen=True, slots=True)
class Listing:
    """Several answers, separated by commas, "and" or "or" without brackets; their order is irrelevant."""

    items: tuple["Answer", ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Answers in brackets: a point, a tuple, an interval, and, in braces, a set."""

    opening: str
    items: tuple["Answer", ...]
    closing: str


@dataclass(frozen=True, slots=True)
class Union:
    """A union of intervals and sets."""

    parts: tuple["Answer", ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix as rows of cells; the kind of brackets is ignored."""

    rows: tuple[tuple["Answer", ...], ...]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Numbers separated by colons: a ratio or a time."""

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
        sides: LaTeX texts, one more than ``signs``.
    """

    signs: tuple[str, ...]
    sides: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Congruence:
    """A residue of a modulus, such as ``x = 3 (mod 7)``."""

    residue: "Answer"
    modulus: str


Answer = Number | Formula | Text | Choice | Listing | Group | Union | Matrix | Ratio | Based | Relation | Congruence


def is_time_of_day(answer: Answer | None) -> bool:
    """Return whether an answer is a time such as ``3:00 pm``."""
    return isinstance(answer, Text) and re.fullmatch(r"\d{1,2}:\d\d [ap]m", answer.words) is not None
