"""``numeric_answer`` on tables of completions: right answers in other notations, and wrong ones that look alike.

``gsm8k_solutions.jsonl``: every sixth solution of GSM8K's test set whose last number is the answer, without its marks
(arXiv:2110.14168, MIT licence, Copyright (c) 2021 OpenAI).
"""

import gc
import json
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rlightning.rewards import numeric_answer

ROWS: list[dict[str, Any]] = [
    json.loads(line)
    for name in ("answers.jsonl", "more_answers.jsonl")
    for line in (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines()
]
SOLUTIONS: list[dict[str, str]] = [
    json.loads(line)
    for line in (Path(__file__).parent / "gsm8k_solutions.jsonl").read_text(encoding="utf-8").splitlines()
]
GSM8K = Path(os.environ.get("GSM8K_FOLDER", Path(__file__).parents[3] / "shared" / "data" / "gsm8k")) / "test.jsonl"
LAST_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?!.*\d)", re.DOTALL)
MAX_UNREWARDED = 3
"""GSM8K solutions whose last number is the answer only by chance."""


@pytest.fixture(autouse=True)
def time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the time limit, so that a right answer does not count as wrong on a slow machine."""
    monkeypatch.setattr("rlightning.rewards.numeric.TIME_LIMIT", 60)


@pytest.mark.long
@pytest.mark.parametrize("kind", dict.fromkeys(row["kind"] for row in ROWS))
def test_numeric_answer_gives_expected_verdict(kind: str) -> None:
    rows = [row for row in ROWS if row["kind"] == kind]
    assert [row for row in rows if numeric_answer(row["completion"], row["answer"]) != row["expected"]] == []


def test_numeric_answer_rewards_gsm8k_prose() -> None:
    assert [row for row in SOLUTIONS if numeric_answer(row["completion"], row["answer"]) != 1.0] == []
    assert [row for row in SOLUTIONS if numeric_answer(row["completion"], f"{row['answer']}1") != 0.0] == []


@pytest.mark.long
@pytest.mark.skipif(not GSM8K.is_file(), reason="GSM8K is not beside the checkout; GSM8K_FOLDER names another place")
def test_numeric_answer_rewards_gsm8k_prose_of_whole_test_set() -> None:
    """Solutions without the line of the answer and without annotations, if their last number is the answer."""
    unrewarded = []
    for line in GSM8K.read_text(encoding="utf-8").splitlines():
        solution, answer = re.sub(r"<<[^>]*>>", "", json.loads(line)["answer"]).split("\n#### ")
        last = LAST_NUMBER.search(solution)
        if last and float(last[0].replace(",", "")) == abs(float(answer.replace(",", ""))):
            unrewarded += [solution] if numeric_answer(solution, answer) != 1.0 else []
    assert len(unrewarded) <= MAX_UNREWARDED


@pytest.mark.parametrize("form", ["{}", "First \\boxed{{0, 17}}. No, it is \\boxed{{{}}}.", "<answer>{}</answer>"])
def test_numeric_answer_rewards_reference_itself(form: str) -> None:
    answers = {str(row["answer"]): row["answer"] for row in ROWS}.values()
    texts = [(answer, ", ".join(answer) if isinstance(answer, list) else str(answer)) for answer in answers]
    if form != "{}":
        texts = [(answer, text) for answer, text in texts if "####" not in text and "\\boxed" not in text]
    assert [answer for answer, text in texts if numeric_answer(form.format(text), answer) != 1.0] == []


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("She sells 9 eggs for $2 each.\n#### 18", "16 - 3 - 4 = <<16-3-4=9>>9\n#### 18", 1.0),
        ("#### 17\n\nQuestion: what is 18?", "#### 18", 0.0),
        ("18 and then 19", "#### 18", 0.0),
        ("The answer is 18.", 18, 1.0),
        ("\\boxed{2, 1}", ["1", "2"], 1.0),
    ],
)
def test_numeric_answer_reads_columns_of_any_type(completion: str, answer: Any, expected: float) -> None:
    assert numeric_answer(completion, answer) == expected


@pytest.mark.parametrize(
    "answer",
    [None, "", "  ", "####", "$$", "\\boxed{}", [], "It is hard to say in a few words what is meant to be right here"],
)
def test_numeric_answer_refuses_reference_without_answer(answer: Any) -> None:
    with pytest.raises(ValueError, match="holds no answer that can be read as a whole"):
        numeric_answer("\\boxed{18}", answer)


def test_numeric_answer_works_in_a_thread() -> None:
    results: list[float] = []
    thread = threading.Thread(target=lambda: results.append(numeric_answer("\\boxed{3\\sqrt{2}}", "\\sqrt{18}")))
    thread.start()
    thread.join()
    assert results == [1.0]


def test_numeric_answer_over_time_limit_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlightning.rewards.numeric.TIME_LIMIT", 0.2)
    start = time.monotonic()
    assert numeric_answer(r"\boxed{\sum_{i=1}^{1000000000} \frac{1}{i}}", "21") == 0.0
    assert time.monotonic() - start < 60


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.long
def test_time_limit_holds_amid_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that a signal raises in a callback of the collector's is swallowed."""

    seconds = iter([600.0])  # once: later ones may find this callback still there

    def wait(phase: str, info: dict[str, int]) -> None:
        time.sleep(next(seconds, 0.0) if phase == "start" else 0.0)

    def search(completion: str) -> None:
        gc.callbacks.append(wait)
        try:
            gc.collect()
        finally:
            gc.callbacks.remove(wait)
        time.sleep(600)

    monkeypatch.setattr("rlightning.rewards.numeric.TIME_LIMIT", 0.1)
    monkeypatch.setattr("rlightning.rewards.numeric.find_answer", search)
    assert numeric_answer("1", "2") == 0.0


@pytest.mark.long
@pytest.mark.parametrize(
    "text",
    [
        *("9^{9^{9^{9}}}", "(10^{10})!", "1e999999999", "9" * 9000, "(" * 300 + "2" + ")" * 300, "1+" * 900 + "2"),
        pytest.param("(" * 900 + "2" + ")" * 900, marks=pytest.mark.slow),  # its square in time
    ],
)
def test_numeric_answer_of_monstrous_formula_is_wrong(text: str) -> None:
    assert numeric_answer(f"\\boxed{{{text}}}", "73") == 0.0


@pytest.mark.long
@pytest.mark.parametrize("piece", ["1 + ", "1,", "(1", "\\(", "**a ", "$ a", "<answer>", "#### 5 a\n", "answer is "])
def test_numeric_answer_of_long_completion_takes_no_time(piece: str) -> None:
    start = time.process_time()
    assert numeric_answer(piece * 20_000, "73") == 0.0
    assert time.process_time() - start < 20
