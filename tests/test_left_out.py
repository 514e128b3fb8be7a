"""The last line of a run of tests."""

import pytest
from left_out import LEFT_OUT, OTHERS, describe_left_out, why_left_out

FAST = "not slow and not processes and not long"


def test_deselected_test_counts_by_first_unchosen_marker() -> None:
    assert why_left_out({"processes", "slow"}, FAST) == LEFT_OUT["slow"]
    assert why_left_out({"processes", "slow"}, "not processes") == LEFT_OUT["processes"]
    assert why_left_out({"slow"}, "") == why_left_out({"gpu"}, FAST) == why_left_out(set(), FAST) == OTHERS


@pytest.mark.parametrize(
    ("counts", "status", "line"),
    [
        ({}, 0, "nothing"),
        ({}, 1, "nothing"),
        ({"that are long": 2, "that are slow": 3}, 0, "3 that are slow; 2 that are long"),
        ({}, 5, "everything: no test was run"),
        ({"that are slow": 3}, 5, "everything: no test was run; 3 that are slow"),
        ({"that are slow": 3}, 2, "all that follows where the run broke off; 3 that are slow"),
    ],
)
def test_line_says_what_was_not_run(counts: dict[str, int], status: int, line: str) -> None:
    assert describe_left_out(counts, status) == f"left out: {line}"
