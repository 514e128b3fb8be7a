"""Source is parsed while the interpreter builds another tree."""

import ast
import gc
from pathlib import Path

import pytest

from rlightning.syntax_tree import parse_source

SOURCE = Path(ast.__file__).read_bytes()


def test_valid_source_is_parsed_while_another_tree_is_built() -> None:
    interrupted: list[str] = []

    def parse(phase: str, info: dict[str, int]) -> None:
        """Build a tree amid another one, as a thread may that goes on while garbage is collected."""
        if len(interrupted) < 3:
            interrupted.append(phase)
            ast.parse("x = 1")

    expected = ast.dump(ast.parse(SOURCE))
    gc.callbacks.append(parse)
    try:
        assert ast.dump(parse_source(SOURCE)) == expected
    finally:
        gc.callbacks.remove(parse)
    assert len(interrupted) == 3


def test_invalid_source_raises_a_syntax_error() -> None:
    with pytest.raises(SyntaxError, match="never closed"):
        parse_source("call(")
