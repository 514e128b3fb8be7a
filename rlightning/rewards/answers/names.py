"""Answers that name or approximate a value: ``x = 5``, ``m + n = 73``, ``x in S``, ``x = sqrt(2), about 1.41``."""

import re

from rlightning.rewards.answers.kinds import Answer, Formula, Group, Listing, Relation
from rlightning.rewards.answers.numbers import Number
from rlightning.rewards.answers.reading import read_answer

_NAME = re.compile(
    r"\\frac\s*\{d\w*\}\s*\{d\w+\}|"
    r"(?:\\?[a-zA-Z]+|\\(?:text|overline|vec|angle|triangle|hat|bar)\s*\{?[^{}=]*\}?)'?(?:_(?:\w|\{[^{}]*\}))?(?:\s*\([^()]*\))?"
    r"|\([a-zA-Z](?:\s*,\s*[a-zA-Z])+\)|\|[a-zA-Z]+\||\\(?:angle|triangle)\s*[A-Z]+"
)


def unwrap_pair(reference: Answer, given: Answer) -> tuple[Answer, Answer]:
    """Return both answers, with ``x = 5`` replaced by 5 where the names of variables need not be compared.

    That is so if the other answer is a bare value, or names the same variable.
    """
    named_reference, named_given = _name_and_value(reference), _name_and_value(given)
    if named_reference is not None and named_given is not None:
        same = squeeze(named_reference[0]) == squeeze(named_given[0])
        return (named_reference[1], named_given[1]) if same else (reference, given)
    if named_reference is not None and not _is_relation(given):
        return named_reference[1], given
    if not _is_relation(reference) and isinstance(given, Relation | Listing):
        value = named_given[1] if named_given is not None else _value_of(given)
        return reference, given if value is None else value
    return reference, given


def exact_value(answer: Answer) -> Answer | None:
    """Drop the approximation from an answer such as ``sqrt(2), about 1.41``; None if the approximation is wrong."""
    if not isinstance(answer, Relation) or "~" not in answer.signs:
        return answer
    place = answer.signs.index("~")
    left, right = read_answer(answer.sides[place]), read_answer(answer.sides[place + 1])
    if re.fullmatch(r"\\?[a-zA-Z]+", answer.sides[place]):
        return right
    if not _is_close(left, right):
        return None
    return Relation(answer.signs[:place], answer.sides[: place + 1]) if place else left


def _is_close(exact: Answer | None, rounded: Answer | None) -> bool:
    """Return whether ``rounded`` approximates ``exact``; True if that is unknown."""
    if not isinstance(rounded, Number) or not isinstance(exact, Number | Formula):
        return True
    if isinstance(exact, Number):
        return exact.equals(rounded) or abs(exact.value - rounded.value) <= rounded.last_place
    from rlightning.rewards.answers.formulas import approximates

    return approximates(exact.latex, rounded)


def _is_relation(answer: Answer) -> bool:
    if isinstance(answer, Listing):
        return any(isinstance(item, Relation) for item in answer.items)
    return isinstance(answer, Relation)


def _name_and_value(answer: Answer) -> tuple[str, Answer] | None:
    """Return the variable and its value in ``x = 5``, ``x in S``, ``x = 1, x = 2`` or ``x = 1, 2``; else None."""
    if isinstance(answer, Relation) and set(answer.signs) == {"="}:
        name, value = answer.sides[0], answer.sides[-1]
        if not _NAME.fullmatch(name) and len(answer.sides) == 2 and _NAME.fullmatch(value) and not _has_letters(name):
            name, value = value, name
        read = read_answer(value) if _NAME.fullmatch(name) else None
        return (name, read) if read is not None else None
    if isinstance(answer, Relation) and answer.signs == ("in",) and _NAME.fullmatch(answer.sides[0]):
        read = read_answer(answer.sides[1])
        return (answer.sides[0], read) if read is not None else None
    if isinstance(answer, Listing):
        named = [_name_and_value(item) if isinstance(item, Relation) else None for item in answer.items]
        first = named[0]
        if first is None or any(item is not None and item[0] != first[0] for item in named):
            return None
        rest = [item[1] if item else plain for item, plain in zip(named, answer.items, strict=True)]
        if any(isinstance(item, Relation) for item in rest):
            return None
        return first[0], Listing(tuple(rest))
    return None


def _value_of(answer: Answer) -> Answer | None:
    """Return the value in ``m + n = 73`` or ``2 + 3 = 5``; None for an equation such as ``3x + 4y = 12``."""
    if not isinstance(answer, Relation) or set(answer.signs) != {"="}:
        return None
    left, right = answer.sides[0], answer.sides[-1]
    if _has_letters(right) or (_has_letters(left) and re.search(r"\d", re.sub(r"_(?:\w|\{[^{}]*\})", "", left))):
        return None
    value = read_answer(right)
    return value if _has_letters(left) or _is_close(read_answer(left), value) else None


def _has_letters(text: str) -> bool:
    return (
        re.search(
            r"[a-zA-Z]", re.sub(r"\\(?:frac|sqrt|pi|times|cdot|infty|log|ln|sin|cos|tan|text)(?![a-zA-Z])", "", text)
        )
        is not None
    )


def by_coordinates(answer: Answer, other: Answer) -> Answer:
    """Convert ``(x, y) = (1, 2)`` to the list ``x = 1, y = 2`` if it is compared with a list."""
    if not isinstance(answer, Relation) or answer.signs != ("=",) or not isinstance(other, Listing):
        return answer
    names, values = read_answer(answer.sides[0]), read_answer(answer.sides[1])
    if not isinstance(names, Group) or not isinstance(values, Group) or len(names.items) != len(values.items):
        return answer
    sides = [text[1:-1].split(",") for text in answer.sides]
    return Listing(tuple(Relation(("=",), (a.strip(), b.strip())) for a, b in zip(*sides, strict=False)))


def squeeze(latex: str) -> str:
    """Remove spaces around signs and braces in a formula."""
    return re.sub(r"\s*([^\w\s\\])\s*", r"\1", latex).strip()
