"""When two answers are the same."""

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from rlightning.rewards.answers.numbers import Number
from rlightning.rewards.answers.reading import (
    Answer,
    Based,
    Choice,
    Formula,
    Group,
    Listing,
    Matrix,
    Ratio,
    Relation,
    Text,
    Union,
    read_answer,
)
from rlightning.rewards.answers.units import units_differ

_NAME = re.compile(
    r"(?:\\?[a-zA-Z]+|\\(?:text|overline|vec|angle|triangle|hat|bar)\s*\{?[^{}=]*\}?)'?(?:_(?:\w|\{[^{}]*\}))?(?:\s*\([^()]*\))?"
    r"|\([a-zA-Z](?:\s*,\s*[a-zA-Z])+\)|\|[a-zA-Z]+\||\\(?:angle|triangle)\s*[A-Z]+"
)
_REVERSED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_INFINITY = Formula(r"\infty")
_MINUS_INFINITY = Formula(r"-\infty")


def answers_equal(reference: Answer, given: Answer) -> bool:
    """Whether ``given`` is the answer ``reference``.

    The two do not play the same part: where the reference is a bare value, the given one may name what it is a value
    of, as in ``x = 5``, and the other way round only where the reference names a single thing.
    """
    if reference == given:
        return True
    if isinstance(reference, Choice) or isinstance(given, Choice):
        return _choices_equal(reference, given)
    exact = _exact(reference), _exact(given)
    if exact[0] is None or exact[1] is None:
        return False
    reference, given = _unwrap_pair(exact[0], exact[1])
    if reference == given:
        return True
    if isinstance(reference, Relation) and isinstance(given, Relation):
        return _relations_equal(reference, given)
    regions = _to_region(reference), _to_region(given)
    if isinstance(reference, Relation) or isinstance(given, Relation):
        both = regions[0], regions[1]
        return both[0] is not None and both[1] is not None and _regions_equal(both[0], both[1])
    if isinstance(reference, Union) or isinstance(given, Union):
        return regions[0] is not None and regions[1] is not None and _regions_equal(regions[0], regions[1])
    if isinstance(reference, Listing | Group) or isinstance(given, Listing | Group):
        return _collections_equal(reference, given)
    if isinstance(reference, Matrix) and isinstance(given, Matrix):
        pairs = zip(reference.rows, given.rows, strict=False)
        return len(reference.rows) == len(given.rows) and all(_all_equal(*rows) for rows in pairs)
    if isinstance(reference, Ratio) or isinstance(given, Ratio):
        return _ratios_equal(reference, given)
    if isinstance(reference, Based) and isinstance(given, Based):
        return int(reference.digits, reference.base) == int(given.digits, given.base)
    if isinstance(reference, Text) or isinstance(given, Text):
        return _plain(reference) == _plain(given) != ""
    return _values_equal(reference, given)


def _values_equal(reference: Answer, given: Answer) -> bool:
    if not isinstance(reference, Number | Formula) or not isinstance(given, Number | Formula):
        return False
    if units_differ(reference.unit, given.unit):
        return False
    if isinstance(reference, Number) and isinstance(given, Number):
        return reference.equals(given)
    if isinstance(reference, Formula) and isinstance(given, Formula):
        if _squeeze(reference.latex) == _squeeze(given.latex):
            return True
        from rlightning.rewards.answers.formulas import formulas_equal

        return formulas_equal(reference.latex, given.latex)
    pair = (reference, given) if isinstance(reference, Formula) else (given, reference)
    if isinstance(pair[0], Formula) and isinstance(pair[1], Number):
        from rlightning.rewards.answers.formulas import formula_equals_number

        return formula_equals_number(pair[0].latex, pair[1])
    return False


def _choices_equal(reference: Answer, given: Answer) -> bool:
    if isinstance(reference, Choice) and isinstance(given, Choice):
        return reference.letter == given.letter
    if isinstance(given, Choice):
        return given.rest is not None and answers_equal(reference, given.rest)
    assert isinstance(reference, Choice)
    if isinstance(given, Relation) and given.signs == ("=",):
        right = read_answer(given.sides[1])
        return right is not None and answers_equal(reference, right)
    if isinstance(given, Formula | Text) and re.fullmatch(r"\(?[a-j]\)?", _plain(given)):
        return _plain(given).strip("()").upper() == reference.letter
    return reference.rest is not None and answers_equal(reference.rest, given)


# Equations and inequalities


def _unwrap_pair(reference: Answer, given: Answer) -> tuple[Answer, Answer]:
    """Take the values where one side names what has the value and the other does not."""
    named_reference, named_given = _named(reference), _named(given)
    if named_reference is not None and named_given is not None:
        same = _squeeze(named_reference[0]) == _squeeze(named_given[0])
        return (named_reference[1], named_given[1]) if same else (reference, given)
    if named_reference is not None and not _is_relation(given):
        return named_reference[1], given
    if not _is_relation(reference) and isinstance(given, Relation | Listing):
        value = named_given[1] if named_given is not None else _value_of(given)
        return reference, given if value is None else value
    return reference, given


def _exact(answer: Answer) -> Answer | None:
    """What an approximation stands beside, and beside a name the value; None if it is no approximation of that."""
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
    """Whether one value may be written beside the other; it may where nobody can tell."""
    if not isinstance(rounded, Number) or not isinstance(exact, Number | Formula):
        return True
    if isinstance(exact, Number):
        return answers_equal(exact, rounded) or abs(exact.value - rounded.value) <= rounded.last_place
    from rlightning.rewards.answers.formulas import approximates

    return approximates(exact.latex, rounded)


def _is_relation(answer: Answer) -> bool:
    if isinstance(answer, Listing):
        return any(isinstance(item, Relation) for item in answer.items)
    return isinstance(answer, Relation)


def _named(answer: Answer) -> tuple[str, Answer] | None:
    """The one name and the value of ``x = 5``, ``x in S``, ``x = 1, x = 2`` and ``x = 1, 2``."""
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
        named = [_named(item) if isinstance(item, Relation) else None for item in answer.items]
        first = named[0]
        if first is None or any(item is not None and item[0] != first[0] for item in named):
            return None
        rest = [item[1] if item else plain for item, plain in zip(named, answer.items, strict=True)]
        if any(isinstance(item, Relation) for item in rest):
            return None
        return first[0], Listing(tuple(rest))
    return None


def _value_of(answer: Answer) -> Answer | None:
    """The value of ``m + n = 73`` and of ``2 + 3 = 5``; none of ``3x + 4y = 12``, which is an equation."""
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


def _relations_equal(reference: Relation, given: Relation) -> bool:
    if reference.signs == given.signs and _all_equal(_sides(reference), _sides(given)):
        return True
    names = _region_name(reference), _region_name(given)
    regions = _to_region(reference), _to_region(given)
    if regions[0] is not None and regions[1] is not None:
        return names[0] == names[1] and _regions_equal(regions[0], regions[1])
    if len(reference.signs) != 1 or len(given.signs) != 1:
        return False
    from rlightning.rewards.answers.formulas import proportional

    one, other = (reference.sides[0], reference.sides[1]), (given.sides[0], given.sides[1])
    factor = proportional(one, other)
    if factor is None:
        return False
    if reference.signs[0] in ("=", "!="):
        return reference.signs == given.signs
    return reference.signs[0] == (given.signs[0] if factor > 0 else _REVERSED.get(given.signs[0]))


def _sides(relation: Relation) -> list[Answer]:
    return [read_answer(side) or Text(side) for side in relation.sides]


# Intervals


def _region_name(answer: Answer) -> str:
    """The variable of an inequality that is a region."""
    sides = answer.sides if isinstance(answer, Relation) else ()
    return next((side for side in sides if re.fullmatch(r"\\?[a-zA-Z]+", side) and side != r"\infty"), "")


def _to_region(answer: Answer) -> tuple[Answer, ...] | None:
    """The intervals and sets that an answer is the union of, if it is one."""
    if isinstance(answer, Union):
        parts = [_to_region(part) for part in answer.parts]
        return None if any(part is None for part in parts) else tuple(p for part in parts for p in part or ())
    if isinstance(answer, Listing):
        if not all(isinstance(item, Relation | Group | Union) for item in answer.items):
            return None
        if len({_region_name(item) for item in answer.items if isinstance(item, Relation)}) > 1:
            return None
        return _to_region(Union(answer.items))
    if isinstance(answer, Group):
        is_interval = answer.opening == r"\{" or len(answer.items) == 2
        return (answer,) if is_interval else None
    return _interval_of(answer) if isinstance(answer, Relation) else None


def _interval_of(relation: Relation) -> tuple[Answer, ...] | None:
    """``a < x <= b`` as an interval."""
    name = _region_name(relation)
    if not name:
        return None
    sides, signs = list(relation.sides), list(relation.signs)
    if signs[0] in (">", ">="):
        if any(sign not in (">", ">=") for sign in signs):
            return None
        sides, signs = sides[::-1], [_REVERSED[sign] for sign in signs[::-1]]
    if signs == ["!="]:
        point = read_answer(sides[1] if sides[0] == name else sides[0])
        if point is None:
            return None
        return Group("(", (_MINUS_INFINITY, point), ")"), Group("(", (point, _INFINITY), ")")
    if any(sign not in ("<", "<=") for sign in signs):
        return None
    place = sides.index(name)
    if len(sides) == 2:
        sides = [r"-\infty", *sides] if place == 0 else [*sides, r"\infty"]
        signs = ["<", *signs] if place == 0 else [*signs, "<"]
        place = 1
    ends = [read_answer(side) for side in (sides[0], sides[-1])]
    if len(sides) != 3 or place != 1 or ends[0] is None or ends[1] is None:
        return None
    return (Group("[" if signs[0] == "<=" else "(", (ends[0], ends[1]), "]" if signs[1] == "<=" else ")"),)


def _regions_equal(reference: tuple[Answer, ...], given: tuple[Answer, ...]) -> bool:
    return _same_items(reference, given)


# Lists, sets, points


def _collections_equal(reference: Answer, given: Answer) -> bool:
    """Lists and sets in any order, points and intervals in theirs."""
    brackets = [(a.opening, a.closing) if isinstance(a, Group) else None for a in (reference, given)]
    items = [a.items if isinstance(a, Group | Listing) else (a,) for a in (reference, given)]
    is_set = (r"\{", r"\}")
    if None not in brackets and brackets[0] != brackets[1]:
        return False
    if is_set in brackets:
        return _same_items(_distinct(items[0]), _distinct(items[1]))
    if brackets == [None, None]:
        return _same_items(items[0], items[1])
    is_plain_list = None in brackets and any(bracket == ("(", ")") for bracket in brackets)
    if None in brackets and not (is_plain_list or len(items[0]) != 2):
        return False
    return len(items[0]) > 1 and _all_equal(items[0], items[1])


def _all_equal(reference: Sequence[Answer], given: Sequence[Answer]) -> bool:
    return len(reference) == len(given) and all(map(answers_equal, reference, given))


def _same_items(reference: Sequence[Answer], given: Sequence[Answer]) -> bool:
    """Whether each item of one has its own equal among the other's."""
    if len(reference) != len(given):
        return False
    left = list(given)
    for item in reference:
        match = next((place for place, other in enumerate(left) if answers_equal(item, other)), None)
        if match is None:
            return False
        del left[match]
    return True


def _distinct(items: Sequence[Answer]) -> list[Answer]:
    kept: list[Answer] = []
    for item in items:
        if not any(answers_equal(other, item) for other in kept):
            kept.append(item)
    return kept


def _ratios_equal(reference: Answer, given: Answer) -> bool:
    if isinstance(reference, Ratio) and isinstance(given, Ratio):
        if len(reference.terms) != len(given.terms):
            return False
        if reference.is_clock_time:
            return _all_equal(reference.terms, given.terms)
        return _all_equal(_in_lowest_terms(reference), _in_lowest_terms(given))
    ratio, other = (reference, given) if isinstance(reference, Ratio) else (given, reference)
    assert isinstance(ratio, Ratio)
    if len(ratio.terms) != 2:
        return False
    first, second = ratio.terms
    if ratio.is_clock_time:
        return False
    if isinstance(first, Number) and isinstance(second, Number) and isinstance(other, Number) and second.value:
        is_fraction = not other.is_percent and other.value.denominator > 1
        return is_fraction and first.value / second.value == other.value
    return False


def _in_lowest_terms(ratio: Ratio) -> Sequence[Answer]:
    first = ratio.terms[0]
    numbers = [term for term in ratio.terms if isinstance(term, Number)]
    if len(numbers) < len(ratio.terms) or not isinstance(first, Number) or not first.value:
        return ratio.terms
    return [replace(number, value=Fraction(number.value, first.value), last_place=Fraction(0)) for number in numbers]


# Texts


def _plain(answer: Answer) -> str:
    """Words in lower case without punctuation."""
    if isinstance(answer, Number | Listing | Group | Relation | Union | Matrix | Ratio | Based | Choice):
        return ""
    text = answer.words if isinstance(answer, Text) else answer.latex
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text).casefold()
    text = " ".join(re.sub(r"[.,;:!?\"'`*$]+", " ", text).split())
    return text.removeprefix("the ")


def _squeeze(latex: str) -> str:
    """A formula without the spaces that mean nothing: those beside a sign or a brace."""
    return re.sub(r"\s*([^\w\s\\])\s*", r"\1", latex).strip()
