"""Maps the names of units, such as ``ft^2`` and ``square feet``, to one canonical name."""

import re

_UNITS = """
$: $ us$ dollar usd buck; ¢: ¢ cent penny pennie; nickel; dime; quarter; €: € euro eur; £: £ gbp sterling; ¥: ¥ yen
yuan; ₹: ₹ rs rupee inr; mm; cm; m: m meter metre; km; in: in inch inche; ft: ft foot feet; yd: yd yard; mi: mi
mile; acre; ha: ha hectare; mg; g: g gram gm; kg: kg kilo; t: tonne ton; lb: lb pound; oz: oz ounce; ml; l: l liter
litre; gal: gal gallon; qt: qt quart; pt: pt pint; cup; tbsp: tbsp tablespoon; tsp: tsp teaspoon; ms; s: s sec
second; min: min minute; h: h hr hour; day; week: week wk; month; year: year yr; decade; century: century centurie;
degree: degree deg; rad: rad radian; K: kelvin; N: n newton; ohm; cal: cal calorie; mol: mol mole; bit; B: byte;
kB: kb; MB: mb; GB: gb; TB: tb; J: joule; W: watt; kW: kw; V: volt; A: amp ampere; Hz: hz hertz; Pa: pa pascal;
mi/h: mph; km/h: kmh kmph kph; degree/C: celsius c; degree/F: fahrenheit f
"""
"""Canonical names of units, each followed by its other names; a unit may have only the canonical one."""
_NAMES = {
    name: unit.strip()
    for unit, _, names in (entry.partition(":") for entry in _UNITS.split(";"))
    for name in (names or unit).split()
}
_PREFIXES = ("nano", "micro", "milli", "centi", "deci", "hecto", "kilo", "mega", "giga", "tera")
_SYMBOLS = {"milli": "m", "centi": "c", "kilo": "k", "mega": "M", "giga": "G", "tera": "T"}
_POWERS = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3", "squared": "^2", "cubed": "^3"}
_PER = frozenset({"/", "per", "a", "an", "each", "every"})
_MAY_LACK_PER = ("$", "¢", "€", "£", "¥", "₹", "degree")
"""Units for which "a day" and the like may be left out: ``18 dollars a day`` equals ``18 dollars``."""
_TOKEN = re.compile(r"[a-z]+\$?|[$¢€£¥₹]|\^-?\d|/")


def canonical_unit(text: str) -> str:
    """Return the canonical name of a unit, such as ``ft^2`` or ``mi/h``.

    It is "" for an unknown unit, which is ignored in comparisons.
    """
    plain = re.sub(r"\^\s*\\circ", " degree ", re.sub(r"\\text|\\(?=\$)", " ", text))
    plain = re.sub(r"\s*\^\s*\{?\s*(-?\d)\s*\}?", r" ^\1 ", plain).lower().replace(".", "").replace("\\pounds", "£")
    tokens = _TOKEN.findall(re.sub("[{}]", " ", plain))
    unit, rest = _read_unit(tokens)
    if unit == "degree" and _NAMES.get("".join(rest[:1]), "").startswith("degree/"):
        return _NAMES[rest[0]]
    if unit and rest and rest[0] in _PER:
        per, _ = _read_unit(rest[1:])
        return f"{unit}/{per}" if per else unit
    return unit


def units_differ(one: str, other: str) -> bool:
    """Return whether two canonical units are both known and different."""
    if not one or not other or one == other:
        return False
    (base, _, per), (other_base, _, other_per) = one.partition("/"), other.partition("/")
    return base != other_base or bool(per and other_per) or base not in _MAY_LACK_PER


def _read_unit(tokens: list[str]) -> tuple[str, list[str]]:
    """Parse the unit at the start, with its power; return it and the remaining tokens."""
    before = _POWERS.get(tokens[0], "") if len(tokens) > 1 else ""
    name, *rest = tokens[bool(before) :] or [""]
    unit = _find_name(name)
    after = rest[0] if rest and rest[0][0] == "^" else _POWERS.get("".join(rest[:1]), "")
    rest = rest[bool(after) :]
    # A short name is a unit where no other words follow: "3 in total" is not inches.
    is_word = name.isalpha() and len(name) < 3 and rest and rest[0] not in _PER | {"of"}
    return ("", rest) if is_word or not unit else (unit + (before or after), rest)


def _find_name(name: str) -> str:
    """Return the canonical name of a unit that is one word, with its metric prefix if there is one."""
    unit = _NAMES.get(name) or _NAMES.get(name.removesuffix("s"), "")
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "") if not unit else ""
    bare = _find_name(name.removeprefix(prefix)) if prefix and len(name) > len(prefix) + 2 else ""
    return f"{_SYMBOLS.get(prefix, prefix)}{bare}" if bare else unit
