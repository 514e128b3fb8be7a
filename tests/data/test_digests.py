"""Digests of columns: equal for equal data in any process, other ones for other data."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from rlightning.data import digests
from rlightning.data.digests import digest_columns, encode_value


def test_columns_have_digests_of_their_own() -> None:
    rows: list[dict[str, Any]] = [{"answer": "1", "level": 3}, {"answer": "2", "level": 4}]
    before = digest_columns(rows, ["answer", "level"])
    after = digest_columns([rows[0], {**rows[1], "answer": "3"}], ["answer", "level"])
    assert after["level"] == before["level"] and after["answer"] != before["answer"]
    swapped = digest_columns(rows[::-1], ["level"])
    assert swapped["level"] != before["level"]
    assert digest_columns([{"level": 3}, {}], ["level"]) != digest_columns([{"level": 3}, {"level": None}], ["level"])


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        ("1", b'"1"'),
        (1, b"1"),
        ({"b": 1, "a": [None]}, b'{"a": [null], "b": 1}'),
        (np.arange(3), b'"[0, 1, 2]"'),
        ({(1, 2): "x"}, b"{(1, 2): 'x'}"),
        ({"b", "a"}, b'"set [\\"\'a\'\\", \\"\'b\'\\"]"'),
    ],
)
def test_values_are_encoded_as_text(value: Any, encoded: bytes) -> None:
    assert encode_value(value) == encoded


def test_addresses_are_left_out() -> None:
    assert encode_value([object()]) == b'["<object object>"]'


@pytest.mark.processes
def test_a_set_is_encoded_alike_in_every_process() -> None:
    # The file alone: the package takes seconds to import.
    program = f"import runpy; print(runpy.run_path({digests.__file__!r})['encode_value']({{'s': set('abcdefgh')}}))"
    answers = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(answers) == 1
