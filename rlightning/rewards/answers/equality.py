"""Decides whether two parsed answers are equal."""

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from rlightning.rewards.answers.kinds import (
    Answer,
    Based,
    Choice,
    Congruence,
    Formula,
    Group,
    Listing,
    Matrix,
    Ratio,
    Relation,
    Text,
    Union,
)
from rlightning.rewards.answers.names import by_coordinates, exact_value, squeeze, unwrap_pair
from rlightning.rewards.answers.numbers import Number
from rlightning.rewards.answers.reading import read_answer
from rlightning.rewards.answers.regions import REVERSED, to_region
from rlightning.rewards.answers.units import units_differ


def answers_equal(reference: Answer, given: Answer) -> bool:
    """Return whether ``given``, the answer in a completion, equals the reference answer.

    The comparison is not symmetric: if the reference is a bare value, the given answer may name it, as in ``x = 5``. If
    the reference names its value, the given answer may be a bare value only if there is a single name.
    """
    if reference == given:
        return True
    letters = _choice_letters(reference), _choice_letters(given)
    if letters[0] and letters[1] and (len(letters[0]) > 1 or any(isinstance(a, Choice) for a in (reference, given))):
        return letters[0] == letters[1]
    if isinstance(reference, Choice) or isinstance(given, Choice):
        return _choices_equal(reference, given)
    exact = exact_value(reference), exact_value(given)
    if exact[0] is None or exact[1] is None:
        return False
    reference, given = unwrap_pair(by_coordinates(exact[0], exact[1]), by_coordinates(exact[1], exact[0]))
    if reference == given:
        return True
    for kinds, compare in _COMPARISONS:
        if isinstance(reference, kinds) or isinstance(given, kinds):
            return compare(reference, given)
    return _values_equal(reference, given)


def _values_equal(reference: Answer, given: Answer) -> bool:
    if not isinstance(reference, Number | Formula) or not isinstance(given, Number | Formula):
        return False
    if units_differ(reference.unit, given.unit):
        return False
    if isinstance(reference, Number) and isinstance(given, Number):
        return reference.equals(given)
    if isinstance(reference, Formula) and isinstance(given, Formula):
        if squeeze(reference.latex) == squeeze(given.latex):
            return True
        from rlightning.rewards.answers.formulas import formulas_equal

        return formulas_equal(reference.latex, given.latex)
    pair = (reference, given) if isinstance(reference, Formula) else (given, reference)
    if isinstance(pair[0], Formula) and isinstance(pair[1], Number):
        from rlightning.rewards.answers.formulas import formula_equals_number

        return formula_equals_number(pair[0].latex, pair[1])
    return False


def _choice_letters(answer: Answer) -> frozenset[str]:
    """Return the letters of one or several choices; none for an answer of another kind."""
    if isinstance(answer, Choice):
        return frozenset(answer.letter)
    if isinstance(answer, Listing):
        letters = [item.letter for item in answer.items if isinstance(item, Choice)]
        return frozenset(letters) if len(letters) == len(answer.items) else frozenset()
    text = _source(answer)
    several = re.fullmatch(r"[A-J]{2,10}", text) and len(set(text)) == len(text)
    return frozenset(text.upper()) if several or re.fullmatch(r"[a-j]", text) else frozenset()


def _choices_equal(reference: Answer, given: Answer) -> bool:
    """Compare a choice with another kind of answer: with the right side of an equation, or the text of the choice."""
    if isinstance(given, Choice):
        return given.rest is not None and answers_equal(reference, given.rest)
    assert isinstance(reference, Choice)
    if isinstance(given, Relation) and given.signs == ("=",):
        right = read_answer(given.sides[1])
        return right is not None and answers_equal(reference, right)
    labelled = re.match(r"([A-J])\s+-\s+\S", _source(given))
    if labelled:
        return labelled[1] == reference.letter
    return reference.rest is not None and answers_equal(reference.rest, given)


# Equations and inequalities


def _relations_equal(reference: Answer, given: Answer) -> bool:
    if isinstance(reference, Relation) and isinstance(given, Relation) and _are_written_alike(reference, given):
        return True
    regions = to_region(reference), to_region(given)
    if regions[0] is not None and regions[1] is not None:
        names = regions[0].name, regions[1].name
        return (names[0] == names[1] or not all(names)) and _same_items(regions[0].parts, regions[1].parts)
    return isinstance(reference, Relation) and isinstance(given, Relation) and _equations_equal(reference, given)


def _equations_equal(reference: Relation, given: Relation) -> bool:
    """Compare equations up to a factor, and inequalities up to a positive factor."""
    if len(reference.signs) != 1 or len(given.signs) != 1:
        return False
    from rlightning.rewards.answers.formulas import proportional

    one, other = (reference.sides[0], reference.sides[1]), (given.sides[0], given.sides[1])
    factor = proportional(one, other)
    if factor is None:
        return False
    if reference.signs[0] in ("=", "!="):
        return reference.signs == given.signs
    return reference.signs[0] == (given.signs[0] if factor > 0 else REVERSED.get(given.signs[0]))


def _are_written_alike(reference: Relation, given: Relation) -> bool:
    return reference.signs == given.signs and _all_equal(_sides(reference), _sides(given))


def _sides(relation: Relation) -> list[Answer]:
    return [read_answer(side) or Text(side) for side in relation.sides]


# Lists, sets, points


def _collections_equal(reference: Answer, given: Answer) -> bool:
    """Compare lists and sets in any order; points and intervals in order."""
    if _says_region(reference) or _says_region(given):
        regions = to_region(reference), to_region(given)
        if regions[0] is not None and regions[1] is not None:
            return _relations_equal(reference, given)
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


def _says_region(answer: Answer) -> bool:
    items = answer.items if isinstance(answer, Listing) else (answer,)
    return any(isinstance(item, Relation | Union | Formula) for item in items) and to_region(answer) is not None


def _all_equal(reference: Sequence[Answer], given: Sequence[Answer]) -> bool:
    return len(reference) == len(given) and all(map(answers_equal, reference, given))


def _same_items(reference: Sequence[Answer], given: Sequence[Answer]) -> bool:
    """Return whether the items of two collections can be paired so that the items of each pair are equal."""
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


def _texts_equal(reference: Answer, given: Answer) -> bool:
    return _normalized_words(reference) == _normalized_words(given) != ""


def _source(answer: Answer) -> str:
    return answer.words if isinstance(answer, Text) else answer.latex if isinstance(answer, Formula) else ""


def _normalized_words(answer: Answer) -> str:
    """Return the words of an answer in lower case without punctuation."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", _source(answer)).casefold()
    text = " ".join(re.sub(r"[.,;:!?\"'`*$]+", " ", text).split())
    return text.removeprefix("the ")


# Other kinds


def _matrices_equal(reference: Answer, given: Answer) -> bool:
    if not isinstance(reference, Matrix) or not isinstance(given, Matrix):
        return False
    pairs = zip(reference.rows, given.rows, strict=False)
    return len(reference.rows) == len(given.rows) and all(_all_equal(*rows) for rows in pairs)


def _based_equal(reference: Answer, given: Answer) -> bool:
    """Compare numbers that have a base; a reference with a base also equals its digits without the base."""
    if not isinstance(reference, Based):
        return False
    if isinstance(given, Number):
        return not given.last_place and not given.unit and str(given.value) == reference.digits
    return isinstance(given, Based) and int(reference.digits, reference.base) == int(given.digits, given.base)


def _congruences_equal(reference: Answer, given: Answer) -> bool:
    """Compare congruences; a reference with a modulus also equals its residue alone."""
    if not isinstance(reference, Congruence):
        return False
    if not isinstance(given, Congruence):
        return answers_equal(reference.residue, given)
    one, other = reference.residue, given.residue
    if reference.modulus == given.modulus and isinstance(one, Number) and isinstance(other, Number):
        modulus = int(reference.modulus) if reference.modulus.isdigit() else 0
        return one.value == other.value or (modulus > 0 and (one.value - other.value) % modulus == 0)
    return reference.modulus == given.modulus and answers_equal(one, other)


_COMPARISONS = (
    (Congruence, _congruences_equal),
    (Relation | Union, _relations_equal),
    (Listing | Group, _collections_equal),
    (Matrix, _matrices_equal),
    (Ratio, _ratios_equal),
    (Based, _based_equal),
    (Text, _texts_equal),
)
"""Comparisons by kinds of values, in the order in which the kinds are tried."""
