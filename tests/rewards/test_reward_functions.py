"""The built-in reward functions, by hand."""

import pytest

from rlightning.rewards import exact_match, length_penalty, regex_format


def test_exact_match_ignores_outer_spaces_only() -> None:
    assert exact_match(" 42\n", "42") == 1.0
    assert exact_match("42", 42) == 1.0
    assert exact_match("42.", "42") == 0.0
    assert exact_match("Paris", "paris") == 0.0
    assert exact_match("Paris", "paris", ignore_case=True) == 1.0


def test_regex_format_matches_the_whole_text() -> None:
    pattern = r"<think>.*</think>\s*<answer>.*</answer>"
    assert regex_format("<think>1\n2</think>\n<answer>3</answer>", pattern=pattern) == 1.0
    assert regex_format("so: <think>1</think><answer>3</answer>", pattern=pattern) == 0.0


@pytest.mark.parametrize(("num_tokens", "expected"), [(10, 0.0), (80, 0.0), (85, -0.25), (100, -1.0), (300, -1.0)])
def test_length_penalty_falls_linearly_in_the_buffer(num_tokens: int, expected: float) -> None:
    assert length_penalty(num_tokens, max_tokens=100, buffer_tokens=20) == expected
