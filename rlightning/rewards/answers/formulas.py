"""Parses formulas to sympy expressions, by math-verify's LaTeX parser, and compares their values.

The parser, whose import takes most of a second, is imported for the first formula that needs more than a comparison of
texts.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy, normalize_latex
from sympy import Basic

from rlightning.rewards.answers.numbers import RELATIVE_TOLERANCE, Number

DIGITS = 50
"""Significant decimal digits of the values that are compared."""
MAX_POWER = 10**5
"""Largest exponent or factorial that is computed."""

_NORMALIZATION = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
_CONVERSION = ConversionConfig(lowercase_symbols=False)
# Texts that the parser misreads: two adjacent numbers as their sum, "1.2.3" as a product, primes and dots as nothing;
# and percent signs, which belong to numbers.
_MISREAD = re.compile(r"\d\.\d+\.|['%~?!]{2}|'|\\prime|\\[lc]?dots|\.\.\.|\\pm|\\mp|\\approx|\\equiv|\\pmod|\\text")
_SIDE_BY_SIDE = re.compile(r"\d\s+\d")
_ANGLE = re.compile(r"(\d*\.?\d*[a-zA-Z]?|\\[a-zA-Z]+|\([^()]*\)|\{[^{}]*\})\s*\^\s*\\circ(?![a-zA-Z])")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_LOG_WITHOUT_BASE = re.compile(r"\\log(?![a-zA-Z])(?!\s*_)")
_POINTS = [
    Fraction(n, d) for n, d in [(37, 23), (-29, 17), (53, 41), (-19, 31), (61, 13), (43, 59), (-71, 47), (83, 67)]
]
"""Values of the variables at which formulas are compared: on both sides of 0 and of 1."""


@lru_cache(maxsize=256)
def parse(latex: str) -> Basic:
    """Parse a whole normalised text to a sympy expression; None if the parser cannot parse all of it.

    Degrees in trigonometric functions are converted to radians. A logarithm without a base, which may mean e or 10,
    gets a symbolic base.
    """
    if _MISREAD.search(latex):
        return None
    if _TRIGONOMETRIC.search(latex):
        latex = _ANGLE.sub(r"\\frac{\1\\pi}{180}", latex)
    latex = _LOG_WITHOUT_BASE.sub(r"\\log_{\\Xi}", latex)
    try:
        text = normalize_latex(latex, _NORMALIZATION)
        if _SIDE_BY_SIDE.search(text):
            return None
        expression = latex2sympy(
            text, is_real=True, convert_degrees=False, normalization_config=None, conversion_config=_CONVERSION
        )
    except Exception:  # the parser raises plain Exceptions, and sympy many other types
        return None
    if isinstance(expression, sympy.MatrixBase):
        return expression
    if not isinstance(expression, sympy.Basic) or isinstance(expression, sympy.Tuple):
        return None
    return _replace_constants(expression)


def formulas_equal(reference: str, given: str) -> bool:
    """Return whether two formulas have the same value for all values of their variables."""
    one, other = (_sum_up(parse(latex)) for latex in (reference, given))
    return one is not None and other is not None and _equal(one, other)


def formula_equals_number(formula: str, number: Number) -> bool:
    """Return whether a formula without variables equals a number; a decimal has a tolerance."""
    expression = parse(formula)
    if expression is None or not isinstance(expression, sympy.Expr) or expression.free_symbols:
        return False
    if _is_beyond_bounds(expression):
        return False
    values = [number.value] + ([number.value / 100] if number.is_percent else [])
    return any(_equals_fraction(expression, value, number.last_place > 0) for value in values)


def proportional(reference: tuple[str, str], given: tuple[str, str]) -> Fraction | float | None:
    """Return the constant c with ``left - right = c (left' - right')`` for two equations; None if there is none."""
    sides = [parse(side) for side in (*reference, *given)]
    if any(side is None or not isinstance(side, sympy.Expr) or _is_beyond_bounds(side) for side in sides):
        return None
    one, other = sides[0] - sides[1], sides[2] - sides[3]
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    if not symbols or one.free_symbols != other.free_symbols:
        return None
    ratios = []
    for point in _points(symbols):
        above, below = _value(one, point), _value(other, point)
        if above is None or below is None:
            continue
        if abs(below) < 1e-30 or abs(above) < 1e-30:
            return None
        ratios.append(above / below)
    if len(ratios) < 3 or any(abs(ratio - ratios[0]) > 1e-25 * abs(ratios[0]) for ratio in ratios):
        return None
    return float(sympy.re(ratios[0])) if abs(sympy.im(ratios[0])) < 1e-25 else None


def approximates(formula: str, number: Number) -> bool:
    """Return whether a formula's value lies within one unit of a number's last digit; True if the value is unknown."""
    expression = parse(formula)
    if expression is None or not isinstance(expression, sympy.Expr) or _is_beyond_bounds(expression):
        return True
    value = _value(expression, {})
    return value is None or bool(abs(value - _rational(number.value)) <= _rational(number.last_place or Fraction(1, 2)))


def _sum_up(expression: Basic) -> Basic:
    """Replace sums over a variable number of terms by closed forms, which also have values between the integers."""
    is_sum = isinstance(expression, sympy.Expr) and expression.has(sympy.Sum) and expression.free_symbols
    return expression.doit() if is_sum else expression


def _replace_constants(expression: Basic) -> Basic:
    """Replace decimals by exact rational numbers, and i by the imaginary unit."""
    floats = {number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float)}
    expression = expression.xreplace(floats) if floats else expression
    imaginary = {symbol: sympy.I for symbol in expression.free_symbols if symbol.name == "i"}
    return expression.xreplace(imaginary) if imaginary else expression


def _equal(one: Basic, other: Basic) -> bool:
    if isinstance(one, sympy.MatrixBase) or isinstance(other, sympy.MatrixBase):
        return type(one) is type(other) and one.shape == other.shape and all(map(_equal, one.flat(), other.flat()))
    if isinstance(one, sympy.Set) or isinstance(other, sympy.Set):
        return _sets_equal(one, other)
    if one == other:
        return True
    if not isinstance(one, sympy.Expr) or not isinstance(other, sympy.Expr):
        return False
    if _is_beyond_bounds(one) or _is_beyond_bounds(other):
        return False
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    if not symbols:
        return _constants_equal(one, other)
    pairs = [(_value(one, point), _value(other, point)) for point in _points(symbols)]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if len(known) < 3:
        return bool(sympy.simplify(one - other) == 0)
    return all(_agree(a, b) for a, b in known)


def _sets_equal(one: Basic, other: Basic) -> bool:
    if not isinstance(one, sympy.Set) or not isinstance(other, sympy.Set):
        return False
    one, other = one.doit(), other.doit()
    return bool(one == other or (one - other) | (other - one) == sympy.S.EmptySet)


def _constants_equal(one: Basic, other: Basic) -> bool:
    one, other = one.doit(), other.doit()
    if not isinstance(one, sympy.Expr) or not isinstance(other, sympy.Expr):
        return _equal(one, other)
    if one.is_Rational and other.is_Rational:
        return bool(one == other)
    if one.is_Rational and other.is_rational:
        return bool(sympy.simplify(other - one) == 0)
    a, b = _value(one, {}), _value(other, {})
    if a is None or b is None:
        return bool(sympy.simplify(one - other) == 0)
    return _agree(a, b)


def _equals_fraction(expression: Basic, value: Fraction, is_decimal: bool) -> bool:
    expression, exact = expression.doit(), sympy.Rational(value.numerator, value.denominator)
    if expression.is_Rational and not is_decimal:
        return bool(expression == exact)
    computed = _value(expression, {})
    if computed is None:
        return False
    tolerance = float(RELATIVE_TOLERANCE) if is_decimal else 1e-40
    return bool(
        abs(computed - exact) <= tolerance * abs(exact) and (exact != 0 or expression == 0 or abs(computed) < 1e-40)
    )


def _agree(one: Basic, other: Basic) -> bool:
    scale = max(abs(one), abs(other))
    return bool(abs(one - other) <= 1e-40 * scale) or bool(scale < 1e-45)


def _value(expression: Basic, point: dict[Basic, Basic]) -> Basic:
    """Return the finite complex value of an expression at a point; None if it has none."""
    try:
        value = sympy.N(expression.xreplace(point).doit(), DIGITS, maxn=2000)
    except Exception:  # sympy raises many types of errors
        return None
    is_number = value.is_number and not value.free_symbols and value.is_finite
    return value if is_number and all(part.is_Number for part in value.as_real_imag()) else None


def _points(symbols: Sequence[Basic]) -> list[dict[Basic, Basic]]:
    count = len(_POINTS)
    return [
        {symbol: _rational(_POINTS[(i + 3 * k) % count] + Fraction(k, 7)) for k, symbol in enumerate(symbols)}
        for i in range(count)
    ]


def _rational(value: Fraction) -> Basic:
    return sympy.Rational(value.numerator, value.denominator)


def _is_beyond_bounds(expression: Basic) -> bool:
    """Return whether computing the expression would need numbers with too many digits."""
    for node in sympy.preorder_traversal(expression):
        size = node.exp if isinstance(node, sympy.Pow) else node.args[0] if isinstance(node, sympy.factorial) else None
        if size is None or not size.is_number:
            continue
        if abs(sympy.N(size, 5)) > MAX_POWER:
            return True
    return False
