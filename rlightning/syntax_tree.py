"""Parses Python source while other threads do so too, in which Python before 3.11.8 and 3.12.2 may fail."""

import ast

ATTEMPTS = 20
"""How often a source is parsed before the interpreter's error is raised."""


def parse_source(source: str | bytes) -> ast.Module:
    """Return the syntax tree of a source, as ``ast.parse`` does.

    Python 3.11 before 3.11.8 and 3.12 before 3.12.2 count the depth of all trees that are being built in one place.
    If another thread builds one meanwhile, valid source fails by ``SystemError: AST constructor recursion depth
    mismatch`` (https://github.com/python/cpython/issues/106905), and is parsed again here.

    Raises:
        SyntaxError: if the source is not valid Python.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return ast.parse(source)
        except SystemError:
            continue
    return ast.parse(source)
