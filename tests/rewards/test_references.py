"""Reference answers graded against themselves, before the first step."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from rlightning.errors import ConfigError
from rlightning.rewards import RewardFunction, RewardRunner, answer_checker, numeric_answer
from rlightning.rewards.calls import RewardResult
from rlightning.rewards.config import bind_rewards
from rlightning.rewards.references import AnswerCheck, choose_evenly, report_unrewarded
from rlightning.types import Prompt


def make_prompts(answers: list[Any]) -> list[Prompt]:
    return [Prompt(i, "What is it?", [1], {"solution": answer}) for i, answer in enumerate(answers)]


def where(row: int) -> str:
    return f"train.jsonl, line {row + 1}"


@answer_checker(parameter="target", completion="<answer>{}</answer>")
def tagged(completion: str, target: object) -> float:
    return 2.0 * (completion == f"<answer>{target}</answer>") - 1.0


@answer_checker
def never(completion: str, answer: object) -> float:
    return -1.0


def test_answer_check_makes_completions() -> None:
    assert AnswerCheck("answer", "{}").make_completion(1e16) == "1e+16"
    assert AnswerCheck("answer", r"\boxed{{{}}}").make_completion(["1", "2"]) == r"\boxed{1, 2}"


def test_bind_rewards_finds_the_mark() -> None:
    marked, builtin, bound, plain = bind_rewards(
        [
            tagged,
            numeric_answer,
            RewardFunction(never, arguments={"answer": "1"}),
            RewardFunction("rlightning.rewards.regex_format", arguments={"pattern": "x"}),
        ]
    )
    assert marked.answer_check == AnswerCheck("target", "<answer>{}</answer>")
    assert builtin.answer_check == AnswerCheck("answer", "{}")
    assert bound.answer_check is None  # its reference is no column
    assert plain.answer_check is None


def test_bind_rewards_refuses_mark_of_unknown_parameter() -> None:
    @answer_checker(parameter="anser")
    def checker(completion: str, answer: str) -> float:
        return 1.0

    with pytest.raises(ConfigError, match=r"marked as an answer_checker of 'anser'.*Did you mean 'answer'\?"):
        bind_rewards([checker])


def test_choose_evenly_spans_the_set() -> None:
    chosen = [prompt.index for prompt in choose_evenly(make_prompts(["1"] * 5000))]
    assert len(chosen) == 2000
    assert chosen[:3] == [0, 2, 5]
    assert chosen[-1] == 4997
    assert len(choose_evenly(make_prompts(["1"] * 7))) == 7


@pytest.mark.parametrize(("max_share", "is_error"), [(0.02, True), (0.5, False)])
def test_report_unrewarded_counts_and_shows_three(
    caplog: pytest.LogCaptureFixture, max_share: float, is_error: bool
) -> None:
    prompts = dict(enumerate(make_prompts(["a", "b", "c" * 100, "d", "e", "f", "g", "h", "i", "j"])))
    good, bad = RewardResult(1.0), RewardResult(0.0)
    # One of them does not apply, and does not count.
    outcomes = dict(enumerate([good, bad, bad, RewardResult(None, "Trace\nValueError: no answer"), bad, *[good] * 4]))
    outcomes[9] = RewardResult(None)
    if is_error:
        with pytest.raises(ConfigError) as caught:
            report_unrewarded("check", "solution", prompts, outcomes, where, max_share)
        message = str(caught.value)
        assert "model.max_unrewarded_references=0.02" in message
    else:
        with caplog.at_level(logging.WARNING):
            report_unrewarded("check", "solution", prompts, outcomes, where, max_share)
        message = caplog.text
    assert "'check' gives no reward to the reference answer itself in 4 of 9 rows: train.jsonl, line 2: 'b';" in message
    assert f"line 3: '{'c' * 56}...; train.jsonl, line 4: 'd' (ValueError: no answer); ..." in message
    assert "line 5" not in message


def test_report_unrewarded_is_silent_without_any(caplog: pytest.LogCaptureFixture) -> None:
    report_unrewarded("check", "solution", {}, {0: RewardResult(1.0), 1: RewardResult(None)}, where, 0.0)
    assert not caplog.text


@pytest.fixture
def runner() -> Iterator[RewardRunner]:
    numeric = RewardFunction("rlightning.rewards.numeric_answer", columns={"answer": "solution"})
    runner = RewardRunner([numeric, RewardFunction(lambda completion: 1.0, name="other")], num_workers=1)
    yield runner
    runner.close()


def test_check_answers_gives_checkers_what_they_ask_for() -> None:
    @answer_checker
    def ends_alike(full_text: str, turns: list[Any], answer: str) -> float:
        return float(full_text == f"What is it?{answer}" and turns[-1]["content"] == answer)

    runner = RewardRunner(RewardFunction(ends_alike, columns={"answer": "solution"}))
    runner.check_answers(make_prompts(["18", "19"]), where)


@pytest.mark.processes
def test_check_answers_grades_with_worker_processes(runner: RewardRunner) -> None:
    runner.check_answers(make_prompts(["3 + 4 = 7\n#### 7", r"3\sqrt{13}", "[-2,7]", 1e16, "Yes"] * 10), where)
    with pytest.raises(ConfigError, match=r"in 1 of 5 rows: train\.jsonl, line 3: '' \(ValueError: The reference"):
        runner.check_answers(make_prompts(["7", "8", "", "9", "10"]), where)
