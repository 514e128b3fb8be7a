"""The built-in reward functions, by hand."""

import threading

import pytest

from rlightning.rewards import exact_match, length_penalty, numeric_answer, regex_format


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is right must not count as wrong because the machine is slow."""
    monkeypatch.setattr("rlightning.rewards.numeric.TIME_LIMIT", 60)


def test_exact_match() -> None:
    assert exact_match(" 42\n", "42") == 1.0
    assert exact_match("42", 42) == 1.0
    assert exact_match("42.", "42") == 0.0
    assert exact_match("Paris", "paris") == 0.0
    assert exact_match("Paris", "paris", ignore_case=True) == 1.0


def test_regex_format() -> None:
    pattern = r"<think>.*</think>\s*<answer>.*</answer>"
    assert regex_format("<think>1\n2</think>\n<answer>3</answer>", pattern=pattern) == 1.0
    assert regex_format("so: <think>1</think><answer>3</answer>", pattern=pattern) == 0.0


@pytest.mark.parametrize(("num_tokens", "expected"), [(10, 0.0), (80, 0.0), (85, -0.25), (100, -1.0), (300, -1.0)])
def test_length_penalty(num_tokens: int, expected: float) -> None:
    assert length_penalty(num_tokens, max_tokens=100, buffer_tokens=20) == expected


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("She sells 9 eggs for $2 each.\n#### 18", "16 - 3 - 4 = <<16-3-4=9>>9\n#### 18", 1.0),
        ("The answer is 18.", "#### 18", 1.0),
        ("The answer is 18.0", "#### 18", 1.0),
        ("It costs $70,000", "#### 70000", 1.0),
        ("#### 70000", "#### 70,000", 1.0),
        ("#### 17\n\nQuestion: what is 18?", "#### 18", 0.0),
        ("18 and then 19", "#### 18", 0.0),
        (r"So \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"So $\boxed{\frac{1}{3}}$", "0.5", 0.0),
        ("-3", "-3", 1.0),
        ("no idea", "18", 0.0),
        ("", "18", 0.0),
    ],
)
def test_numeric_answer(completion: str, answer: str, expected: float) -> None:
    assert numeric_answer(completion, answer) == expected


def test_numeric_answer_in_a_thread() -> None:
    results: list[float] = []
    thread = threading.Thread(target=lambda: results.append(numeric_answer("#### 18", "18")))
    thread.start()
    thread.join()
    assert results == [1.0]


def test_a_reference_without_an_answer_is_an_error() -> None:
    with pytest.raises(ValueError, match="'unknown' holds no number and no formula"):
        numeric_answer("18", "unknown")
