"""Regions of the real line: intervals, sets and unions of them, and the inequalities that describe them."""

import re
from dataclasses import dataclass
from fractions import Fraction

from rlightning.rewards.answers.kinds import Answer, Formula, Group, Listing, Relation, Union
from rlightning.rewards.answers.numbers import Number
from rlightning.rewards.answers.reading import read_answer
from rlightning.rewards.answers.structures import line_without

REVERSED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_ABSOLUTE = re.compile(r"\|\s*(\\?[a-zA-Z]+)\s*\|")


@dataclass(frozen=True, slots=True)
class Region:
    """A union of intervals and sets, with the name of their variable, or ""."""

    parts: tuple[Answer, ...]
    name: str = ""


def to_region(answer: Answer) -> Region | None:
    """Convert an answer to a region, or return None; adjacent intervals between numbers are merged."""
    if isinstance(answer, Union | Listing):
        items = answer.parts if isinstance(answer, Union) else answer.items
        regions = [to_region(item) for item in items]
        names = {region.name for region in regions if region is not None}
        if None in regions or len(names) > 1:
            return None
        if all(isinstance(item, Relation) and item.signs == ("!=",) for item in items):
            points = [region.parts[0].items[1] for region in regions if region]  # type: ignore[union-attr]
            are_numbers = all(isinstance(point, Number) for point in points)
            return Region(line_without(points), names.pop()) if are_numbers else None
        return Region(_merge(tuple(part for region in regions if region for part in region.parts)), names.pop())
    if isinstance(answer, Group):
        return Region((answer,)) if answer.opening == r"\{" or len(answer.items) == 2 else None
    if isinstance(answer, Formula):
        return Region(line_without([])) if answer.latex in (r"\mathbb{R}", r"\R", r"\Reals") else None
    return _solve(answer) if isinstance(answer, Relation) else None


def _solve(relation: Relation) -> Region | None:
    """Convert ``a < x <= b``, ``x != a``, ``|x| < a`` or ``x in S`` to a region."""
    sides, signs = list(relation.sides), list(relation.signs)
    if signs == ["in"]:
        whole = read_answer(sides[1])
        region = to_region(whole) if whole is not None and _is_name(sides[0]) else None
        return Region(region.parts, sides[0]) if region is not None else None
    if signs[0] in (">", ">="):
        sides, signs = sides[::-1], [REVERSED.get(sign, "") for sign in signs[::-1]]
    if len(sides) == 2 and any(map(_ABSOLUTE.fullmatch, sides)):
        return _solve_absolute(sides, signs[0])
    name = next((side for side in sides if _is_name(side)), "")
    if not name:
        return None
    place = sides.index(name)
    if signs == ["!="]:
        point = read_answer(sides[1 - place])
        return None if point is None else Region(line_without([point]), name)
    if len(sides) == 2:
        sides = [r"-\infty", *sides] if place == 0 else [*sides, r"\infty"]
        signs = ["<", *signs] if place == 0 else [*signs, "<"]
    ends = read_answer(sides[0]), read_answer(sides[-1])
    is_chain = len(sides) == 3 and sides[1] == name and all(sign in ("<", "<=") for sign in signs)
    if not is_chain or ends[0] is None or ends[1] is None:
        return None
    brackets = "[" if signs[0] == "<=" else "(", "]" if signs[1] == "<=" else ")"
    return Region((Group(brackets[0], (ends[0], ends[1]), brackets[1]),), name)


def _solve_absolute(sides: list[str], sign: str) -> Region | None:
    """Convert ``|x| < a`` or ``a < |x|`` to a region."""
    match = _ABSOLUTE.fullmatch(sides[0])
    outside = _ABSOLUTE.fullmatch(sides[1])
    bound = sides[1] if match else sides[0]
    if sign not in ("<", "<=") or (match and outside) or re.search("[-+]", bound):
        return None
    if match:
        return _solve(Relation((sign, sign), (f"-{bound}", match[1], bound)))
    assert outside is not None
    below = _solve(Relation((sign,), (outside[1], f"-{bound}")))
    above = _solve(Relation((sign,), (bound, outside[1])))
    return Region(below.parts + above.parts, outside[1]) if below and above else None


def _is_name(text: str) -> bool:
    return re.fullmatch(r"\\?[a-zA-Z]+", text) is not None and text not in (r"\infty", r"\pi", "e")


def _merge(parts: tuple[Answer, ...]) -> tuple[Answer, ...]:
    """Merge intervals between numbers that overlap or touch."""
    ends = [_ends(part) for part in parts]
    if any(end is None for end in ends):
        return parts
    merged: list[Group] = []
    order = sorted(range(len(parts)), key=lambda place: (ends[place][0], parts[place].opening != "["))  # type: ignore[index, union-attr]
    for group in (parts[place] for place in order):
        assert isinstance(group, Group)
        last = merged[-1] if merged else None
        gap = None if last is None else _sort_key(group.items[0]) - _sort_key(last.items[1])  # type: ignore[operator]
        if last is None or gap > 0 or (gap == 0 and (last.closing, group.opening) == (")", "(")):  # type: ignore[operator]
            merged.append(group)
            continue
        further = max(last, group, key=lambda one: (_sort_key(one.items[1]), one.closing == "]"))
        merged[-1] = Group(last.opening, (last.items[0], further.items[1]), further.closing)
    return tuple(merged)


def _ends(part: Answer) -> tuple[Fraction | float, Fraction | float] | None:
    if not isinstance(part, Group) or part.opening == r"\{" or len(part.items) != 2:
        return None
    low, high = map(_sort_key, part.items)
    return None if low is None or high is None else (low, high)


def _sort_key(end: Answer) -> Fraction | float | None:
    """Return a key by which the ends of intervals are sorted; None for an end whose value is not a plain number."""
    if isinstance(end, Number):
        return end.value
    infinities = {r"\infty": float("inf"), r"+\infty": float("inf"), r"-\infty": float("-inf")}
    return infinities.get(end.latex.replace(" ", "")) if isinstance(end, Formula) else None
