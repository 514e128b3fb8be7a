"""Converts equivalent mathematical notations to one: Unicode signs, LaTeX spacing, styles, delimiters."""

# ruff: noqa: RUF001 (signs that look alike are what this module is about)

import re
from collections.abc import Sequence

# fmt: off
_SIGNS_BY_NOTATION = {
    "-": "−–‐‑﹣－", "+": "＋", r"\times ": "×", r"\cdot ": "⋅·∙", "/": "÷∕⁄／", "=": "＝", r"\le ": "≤⩽",
    r"\ge ": "≥⩾", r"\ne ": "≠", r"\approx ": "≈", r"\pm ": "±", r"\cup ": "∪", r"\cap ": "∩", r"\in ": "∈",
    r"\infty ": "∞", r"\pi ": "π", r"\theta ": "θ", r"\alpha ": "α", r"\beta ": "β", r"\lambda ": "λ",
    r"\emptyset ": "∅", r"\mathbb{R}": "ℝ", r"^\circ ": "°º", "%": "％", ",": "，", ";": "；", ":": "：", "(": "（",
    ")": "）", ".": "。", r"\sqrt ": "√", " 1/2": "½", " 1/4": "¼", " 3/4": "¾", " 1/3": "⅓", " 2/3": "⅔",
    " ": "\u00a0\u202f\u2009", "": "\u200b", "'": "′’",
}
# fmt: on
_UNICODE = {sign: notation for notation, signs in _SIGNS_BY_NOTATION.items() for sign in signs}
_UNICODE |= {chr(ord("０") + digit): str(digit) for digit in range(10)}
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")

# Order matters: later replacements apply to the results of earlier ones.
_STYLES: Sequence[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|bigskip)(?![a-zA-Z])", ""),
        (r"\\(?:tiny|scriptsize|footnotesize|small|normalsize|[lL]arge|LARGE|[hH]uge)(?![a-zA-Z])", ""),
        (
            r"\\(?:boldsymbol|bold|bm|pmb|underline|emph|mathord|mathbin|mathrel|mathtt|ensuremath|therefore|because)(?![a-zA-Z])",
            "",
        ),
        (
            r"\\(?:text|page|f)?color(?:box)?\s*(?:\[[^\]]*\])?\s*\{[^{}]*\}|\\[hv]?phantom\s*\{[^{}]*\}|\\(?:label|tag)\*?\s*\{[^{}]*\}",
            "",
        ),
        (r"\\math(?:rm|bf|it|sf)\s*(?:\{\s*([b-fi-kp-rt-zB-FI-KP-RT-Z])\s*\}|\s([ijk])(?![a-zA-Z]))", r" \1\2"),
        (r"(?<!^)\\text\s*\{\s*i\s*\}", " i"),
        (r"\\text\s*\{\s*([:.,])\s*\}|\{(:)\}", r"\1\2"),
        (r"(?:\\\\)+\s*$", ""),
        (r"\\math(?:rm|bf|it|sf)\s*(?=\{\s*\\[a-z]+\s*\{)", ""),
        (
            r"\\frac\s*\{\s*\\(?:text|mathrm)\s*\{([^{}\d]*)\}\s*\}\s*\{\s*\\(?:text|mathrm)\s*\{([^{}\d]*)\}\s*\}",
            r"\\text{\1/\2}",
        ),
        (r"\\text\s*\{\s*(?:all\s+)?real(?:\s+number)?s\s*\}|^(?:all\s+)real(?:\s+number)?s$", r"\\mathbb{R}"),
        (r"\\text\s*\{\s*\\text[a-z]*\s*\{([^{}]*)\}\s*\}", r"\\text{\1}"),
        (r"\\[td]?binom\s*(\w)\s*(\w)", r"\\binom{\1}{\2}"),
        (r"(?<=\d)\s*\^\s*(?:\{\s*(?:\\[a-z]+\s*\{)?|\\[a-z]+\s*\{)\s*(?:st|nd|rd|th)\s*\}\s*\}?", ""),
        (
            r"\\(?:left|right|[bB]igg?[lrm]?)(?=\s*(?:[()\[\]|.<>/]|\\[{}|]|\\[lr](?:brace|brack|angle|vert|floor|ceil)))",
            "",
        ),
        (r"\\(?:lbrace|\{)(?![a-zA-Z])\s*", r"\\{"),
        (r"\s*\\(?:rbrace|\})(?![a-zA-Z])", r"\\}"),
        (r"\\(?:lbrack)(?![a-zA-Z])", "["),
        (r"\\(?:rbrack)(?![a-zA-Z])", "]"),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\frac\s*(\\(?:pi|theta|alpha|beta|phi)(?![a-zA-Z]))\s*(?=[\d{a-z])", r"\\frac{\1}"),
        (r"(?<=\\frac)(\{[^{}]*\})\s*(\\(?:pi|theta|alpha|beta|phi)(?![a-zA-Z])|\d)", r"\1{\2}"),
        (r"\\d?tbinom(?![a-zA-Z])|\\dbinom(?![a-zA-Z])", r"\\binom"),
        (r"(?<=\d)\s*\{,\}\s*(?=\d{3})", ","),
        (r"(?<=\d)(?:,\\!|\\,|\\!)\s*(?=\d{3}(?!\d))", ","),
        (r"\\!", ""),
        (r"(?<!\\)\\[,;:> ]|\\q?quad(?![a-zA-Z])|(?<!\\)~|\\hspace\*?\{[^{}]*\}", " "),
        (r"\\leqslant(?![a-zA-Z])|\\leq(?![a-zA-Z])|<=", r"\\le "),
        (r"\\geqslant(?![a-zA-Z])|\\geq(?![a-zA-Z])|>=", r"\\ge "),
        (r"\\neq(?![a-zA-Z])|!=", r"\\ne "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\(?:simeq|thickapprox)(?![a-zA-Z])", r"\\approx "),
        (r"\\(?:varnothing|O)(?![a-zA-Z])", r"\\emptyset "),
        (r"\\(?:lvert|rvert|vert)(?![a-zA-Z])", "|"),
        (r"\\(?:langle)(?![a-zA-Z])", "("),
        (r"\\(?:rangle)(?![a-zA-Z])", ")"),
        (r"\\(?:textdegree|degree)(?![a-zA-Z])|\^\s*\{\s*\\circ\s*\}", r"^\\circ "),
        (r"\\(?:mbox|hbox|textnormal|textrm|textit|textbf|textsf|texttt|mathrm|mathbf|operatorname)\s*\{", r"\\text{"),
        (r"\{\s*\\(?:rm|bf|it)\s+([^{}]*[a-zA-Z]{2}[^{}]*)\}", r"\\text{\1}"),
        (r"\\(?:rm|bf|it|sf|tt|bfseries|itshape)(?![a-zA-Z])", ""),
        (r"\{?\s*([^{}\s]+)\s*\\choose(?![a-zA-Z])\s*([^{}\s]+)\s*\}?", r"\\binom{\1}{\2}"),
        (r"\\(max|min|gcd|lcm)\s*(?:\\\{([^{}()]*)\\\}|\(([^{}()]*)\))", r"\\\1(\2\3)"),
        (r"\\lg(?![a-zA-Z])", r"\\log_{10}"),
        (r"\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?", r"\\overline{\1\2\3}"),
        (r"(?<=[\d.])\\dot\s*\{?(\d)\}?", r"\\overline{\1}"),
        (r"(\.\d*?)(\d{1,6}?)\2{2,}\s*(?:\.\.\.|\\[lc]?dots(?![a-zA-Z])|…)", r"\1\\overline{\2}"),
        (r"\\overline\s*\{\s*([A-Z]{2})\s*\}", r"\1"),
        (r"\\mathbb\s*\{?\s*([A-Z])\s*\}?", r"\\mathbb{\1}"),
        (r"\\text\s*\{\s*\(?\s*mod\s+(\w+)\s*\)?\s*\}", r"\\pmod{\1}"),
        (
            r"\\[pb]?mod\s*(?:\{\s*(\w+)\s*\}|(\w+))|\(\s*(?:\\text\s*\{\s*)?(?:\\b?mod|mod)\s*\}?\s*(\w+)\s*\)",
            r"\\pmod{\1\2\3}",
        ),
        (r"\*\*", "^"),
        (r"\\sqrt\s*(\d+)", r"\\sqrt{\1}"),
        (r"(?<=\d)(?<!\b0)\s*x\s*(?=\$?\d)", r"\\times "),
        # Formulas between dollars inside a text; two amounts of money are not a formula.
        (r"(?<!\\)\$((?:[^$]*[\\^_{}=][^$]*|-?[\d.,]+)(?<!\\))\$(?!\d)", r" \1 "),
        (r"(?<![a-zA-Z\\])(?:infinity|inf|oo)(?![a-zA-Z])", r"\\infty "),
        (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
        (r"(?<![a-zA-Z\\])(sqrt|sin|cos|tan|ln|log)(?=\s*\()", r"\\\1"),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\s+", " "),
    ]
]

_WRAPPERS = [
    (re.compile(pattern, re.DOTALL), group)
    for pattern, group in [
        (r"\$\$(.*)\$\$", "$"),
        (r"\$([^$]*)\$", "$"),
        (r"\\\((.*)\\\)", r"\("),
        (r"\\\[(.*)\\\]", r"\["),
        (r"\*\*(.*)\*\*", "**"),
        (r"__(.*)__", "__"),
        (r"`+([^`]*)`+", "`"),
    ]
]
BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")


def normalize(text: str) -> str:
    """Convert a mathematical text to the one notation in which texts are compared; the meaning does not change."""
    text = strip_wrappers(text)
    if not text.isascii():
        for sign, replacement in _UNICODE.items():
            text = text.replace(sign, replacement)
        text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda match: "^{" + match[0].translate(_SUPERSCRIPTS) + "}", text)
    if re.fullmatch(r"-?\d*\.?\d*", text):
        return text
    for pattern, replacement in _STYLES:
        text = pattern.sub(replacement, text)
    return strip_wrappers(text)


def strip_wrappers(text: str) -> str:
    """Remove white space, a full stop, math delimiters, boxes and Markdown from around the whole text."""
    while True:
        before = text
        text = text.strip()
        if re.search(r"(?<!\\)(?:\\\\)*\\$", text):  # strip() has cut a backslash and a space in two
            text = text[:-1].rstrip()
        if text.endswith(".") and not text.endswith((r"\.", "..")):
            text = text[:-1].rstrip()
        for pattern, mark in _WRAPPERS:
            match = pattern.fullmatch(text)
            if match and mark not in match[1]:
                text = match[1]
        box = BOX.match(text)
        if box:
            end = closing_brace(text, box.end())
            text = text[box.end() + 1 : end] if end == len(text) - 1 else text
        if text.startswith("{") and closing_brace(text, 0) == len(text) - 1:
            text = text[1:-1]
        if text == before:
            return text


def closing_brace(text: str, start: int) -> int | None:
    """Return the position of the brace that closes the one at ``start``; None if there is none."""
    depth = 0
    place = start
    while place < len(text):
        if text[place] == "\\":
            place += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place if place > start else None
        place += 1
    return None


_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|.", re.DOTALL)


def split_top_level(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split a text where ``separator`` matches outside of brackets, braces and environments.

    Separators with a group are kept between the parts, as :func:`re.split` does.
    """
    parts = []
    start = place = depth = 0
    while place < len(text):
        match = separator.match(text, place) if depth == 0 else None
        if match and match.end() > place:
            parts.append(text[start:place])
            parts.extend(match.groups())
            start = place = match.end()
            continue
        token = _TOKEN.match(text, place)
        assert token is not None
        if token[0] in ("(", "[", "{", r"\{", r"\begin"):
            depth += 1
        elif token[0] in (")", "]", "}", r"\}", r"\end"):
            depth -= 1
        place = token.end()
    return [*parts, text[start:]]


def bracketed(text: str) -> tuple[str, str, str] | None:
    """Return the opening bracket, the inside and the closing bracket if one pair encloses the whole text; else None.

    The brackets may be of different kinds: ``[0, 1)``.
    """
    opening = next((b for b in (r"\{", "(", "[") if text.startswith(b)), None)
    closing = next((b for b in (r"\}", ")", "]") if text.endswith(b)), None)
    if opening is None or closing is None or len(text) < len(opening) + len(closing):
        return None
    if (opening == r"\{") != (closing == r"\}"):
        return None
    depth = 0
    inside = text[len(opening) : len(text) - len(closing)]
    for token in _TOKEN.findall(inside):
        depth += token in ("(", "[", "{", r"\{")
        depth -= token in (")", "]", "}", r"\}")
        if depth < 0:
            return None
    return (opening, inside, closing) if depth == 0 else None
