"""Parses composed answers: lists, sets, points, intervals, matrices, systems of equations.

Each reader gets a normalised text and the function that reads its parts.
"""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

from rlightning.rewards.answers.kinds import Answer, Formula, Group, Listing, Matrix, Relation, Union
from rlightning.rewards.answers.notation import bracketed, normalize, split_top_level
from rlightning.rewards.answers.numbers import Number, read_number

Read = Callable[[str], Answer | None]

_DOMAIN = re.compile(r"\\mathbb\{[ZNQRC]\}.*")
_LIST_SEPARATOR = re.compile(
    r"\s*(?!(?<=\d),\d{3}(?!\d))(?:[,;]\s*(?:\\text\s*\{\s*)?(?:(?:and|or)\b)?(?:\s*\})?"
    r"|\\text\s*\{\s*,?\s*(?:and|or)\s*,?\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))\s*"
)
_UNION = re.compile(r"\s*\\cup(?![a-zA-Z])\s*")
_MATRIX = re.compile(
    r"(?:(?P<factor>[^()\[\]=<>,&]*[^()\[\]=<>,&\s])\s*)?[(\[]?\s*"
    r"\\begin\s*\{(?:[pb]?matrix|smallmatrix|array)\}(?:\s*\{[lcr|\s]*\})?(?P<cells>(?:(?!\\begin|\\end).)*)"
    r"\\end\s*\{(?:[pb]?matrix|smallmatrix|array)\}\s*[)\]]?",
    re.DOTALL,
)
_SET_BUILDER = re.compile(
    r"\\\{\s*[a-zA-Z]\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\||:|\\(?:mid|colon)(?![a-zA-Z]))(.*)\\\}", re.DOTALL
)
_OUTWARD_INTERVAL = re.compile(r"([\[\](])([^\[\]()]*[,;][^\[\]()]*)([\[\])])")
_REALS_WITHOUT = re.compile(r"\\mathbb\{R\}\s*(?:\\setminus|\\backslash|-)\s*\\\{(.*)\\\}")
_ROWS = re.compile(
    r"(?:\\\{\s*)?\\begin\s*\{(align|aligned|alignat|gather|gathered|cases|split|eqnarray|equation|array)\*?\}"
    r"(?:\{[lcr\s]*\})?((?:(?!\\begin|\\end).)*)\\end\s*\{\1\*?\}\s*\.?",
    re.DOTALL,
)


def read_listing(text: str, read: Read) -> Answer | None:
    """Parse answers separated by commas, "and" or "or"; parts that state a variable's domain are left out."""
    parts = [part.strip() for part in split_top_level(text, _LIST_SEPARATOR)]
    if len(parts) < 2 or text.startswith("between "):
        return None
    answers = [read(normalize(part)) for part in parts if part]
    values = [answer for answer in answers if not _is_domain(answer)]
    answers = values or answers
    if not answers or any(answer is None for answer in answers):
        return None
    numbers = [answer.value for answer in answers if isinstance(answer, Number)]
    if len(numbers) == len(answers) == text.count(" or ") + 1 and len(set(numbers)) == 1:
        return answers[0]  # 2/8 or 1/4
    both = _between(answers) if not re.search(r"\bor\b", text) else None
    return both or join([answer for answer in answers if answer is not None])


def _between(answers: list[Answer | None]) -> Relation | None:
    """Convert ``x > 1 and x < 3`` to ``1 < x < 3``; None for bounds without common values, which mean a union."""
    bounds: dict[str, tuple[str, str, Number]] = {}
    for answer in answers:
        if not isinstance(answer, Relation) or len(answer.sides) != 2 or answer.signs[0] not in ("<", "<=", ">", ">="):
            return None
        number = read_number(answer.sides[1])
        if number is None or not answer.sides[0].isalpha():
            return None
        bounds[answer.signs[0][0]] = (answer.signs[0], answer.sides[0], number)
    if len(answers) != 2 or len(bounds) != 2 or bounds["<"][1] != bounds[">"][1]:
        return None
    (upper, name, high), (lower, _, low) = bounds["<"], bounds[">"]
    sides = (str(low.value), name, str(high.value))
    return Relation((lower.replace(">", "<"), upper), sides) if low.value < high.value else None


def _is_domain(answer: Answer | None) -> bool:
    """Return whether an answer states only the domain of its variable."""
    return isinstance(answer, Relation) and answer.signs == ("in",) and _DOMAIN.fullmatch(answer.sides[1]) is not None


def join(answers: list[Answer]) -> Answer:
    """Join answers to one flat list; an item may itself be a list, such as both values of a plus-minus sign."""
    items: list[Answer] = []
    for answer in answers:
        items += answer.items if isinstance(answer, Listing) else [answer]
    return Listing(tuple(items)) if len(items) > 1 else items[0]


def read_plus_minus(text: str, read: Read) -> Answer | None:
    """Parse a text with a plus-minus sign to a list of both values."""
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
        both.append(read(normalize(f"{name}={one}" if name else one)))
    return join([answer for answer in both if answer is not None]) if None not in both else None


def read_union(text: str, read: Read) -> Answer | None:
    """Parse intervals and sets that a union sign joins."""
    parts = split_top_level(text, _UNION)
    if len(parts) < 2:
        return None
    parts[0] = re.sub(r"^[a-zA-Z]\s*\\in\s*", "", parts[0])
    answers = tuple(answer for answer in map(read, parts) if answer is not None)
    return Union(answers) if len(answers) == len(parts) else None


def read_group(text: str, read: Read) -> Answer | None:
    """Parse answers in one pair of brackets; brackets around a single value are dropped."""
    inside = bracketed(text)
    if inside is None:
        return None
    opening, content, closing = inside
    parts = [part.strip() for part in split_top_level(content, re.compile(r"\s*[,;]\s*"))]
    if opening == r"\{" and not content.strip():
        return Formula(r"\emptyset")
    items = tuple(answer for answer in map(read, map(normalize, parts)) if answer is not None)
    if len(items) != len(parts):
        return None
    if opening == r"\{":
        joined = join(list(items))
        return Group(opening, joined.items if isinstance(joined, Listing) else (joined,), closing)
    if len(items) == 1:
        return items[0] if (opening, closing) in (("(", ")"), ("[", "]")) else None
    return Group(opening, items, closing)


def read_outward_interval(text: str, read: Read) -> Answer | None:
    """Parse an interval whose open ends are written with outward brackets: ``]2, 5]``."""
    match = _OUTWARD_INTERVAL.fullmatch(text)
    if match is None or (match[1] != "]" and match[3] != "["):
        return None
    return read_group(match[1].replace("]", "(") + match[2] + match[3].replace("[", ")"), read)


def read_set_builder(text: str, read: Read) -> Answer | None:
    """Parse the condition of a set such as ``{x | x > 2}``."""
    match = _SET_BUILDER.fullmatch(text)
    return read(normalize(match[1])) if match else None


def read_reals_without(text: str, read: Read) -> Answer | None:
    """Parse the set of real numbers without some points."""
    match = _REALS_WITHOUT.fullmatch(text)
    points = read(rf"\{{{match[1]}\}}") if match else None
    return Union(line_without(points.items)) if isinstance(points, Group) else None


def line_without(points: Sequence[Answer]) -> tuple[Group, ...]:
    """Return the intervals of the real line between some points, which are sorted if all are numbers."""
    numbers = sorted((point for point in points if isinstance(point, Number)), key=lambda number: number.value)
    ends = [Formula(r"-\infty"), *(numbers if len(numbers) == len(points) else points), Formula(r"\infty")]
    return tuple(Group("(", pair, ")") for pair in pairwise(ends))


def read_matrix(text: str, read: Read) -> Matrix | None:
    """Parse a matrix, and multiply its cells by the factor before it."""
    match = _MATRIX.fullmatch(text)
    if match is None:
        return None
    lines = [line for line in re.split(r"\\\\(?:\[[^\]]*\])?", match["cells"].replace(r"\hline", "")) if line.strip()]
    factor = rf"\cdot {match['factor']}" if match["factor"] else ""
    cells = [[f"({cell}){factor}" if factor else cell for cell in re.split(r"(?<!\\)&", line)] for line in lines]
    rows = [[read(normalize(cell)) for cell in row] for row in cells]
    if not rows or any(cell is None or len(row) != len(rows[0]) for row in rows for cell in row):
        return None
    return Matrix(tuple(tuple(cell for cell in row if cell is not None) for row in rows))


def read_rows(text: str, read: Read) -> Answer | None:
    """Parse a system of equations to a list; of a derivation over several lines, only the last line."""
    match = _ROWS.fullmatch(text)
    if match is None or (match[1] in ("cases", "array") and "&" in match[2]):
        return None
    rows = [normalize(row.replace("&", "")) for row in re.split(r"\\\\(?:\[[^\]]*\])?", match[2]) if row.strip()]
    rows = [row.rstrip(",") for row in rows]
    names = {row.partition("=")[0].strip() for row in rows}
    is_system = match[1] == "cases" or (
        len(names) == len(rows) and all(re.fullmatch(r"[a-zA-Z]", name) for name in names)
    )
    answers = [read(row) for row in (rows if is_system else rows[-1:])]
    return None if None in answers else join([answer for answer in answers if answer is not None])


READERS = (
    read_rows,
    read_set_builder,
    read_outward_interval,
    read_reals_without,
    read_matrix,
    read_listing,
    read_plus_minus,
    read_union,
)
"""The readers that are tried before equations, in their order; :func:`read_group` is tried after equations."""
