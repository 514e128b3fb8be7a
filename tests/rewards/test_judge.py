"""LLM judges, against a real HTTP server that fails, is slow and answers nonsense."""

import asyncio
import json
import logging
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_project import fit_here
from judge_server import JudgeServer
from scoring import MakeRunner, make_trajectories, score, values
from tiny import write_sums
from waiting import PATIENCE_SECONDS

from rlightning.errors import ConfigError
from rlightning.rewards import RewardFunction
from rlightning.rewards import judge as judging
from rlightning.rewards import runner as reward_runner
from rlightning.rewards.judge import Judge, JudgeError

RUBRIC = "Rate it from 0 to 10: {completion}"
KEY = "sk-a-secret-of-the-user"


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with JudgeServer.serving() as server:
        yield server


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "FIRST_DELAY", 0.01)


def make(server: JudgeServer, rubric: str = RUBRIC, **arguments: Any) -> Judge:
    judge = Judge(rubric, model="judge", base_url=f"{server.url}/v1", **arguments)
    judge.check_arguments()
    return judge


def ask(judge: Judge, *completions: str, **columns: str) -> list[Any]:
    """The scores, or the texts of errors."""

    async def ask_all() -> list[Any]:
        calls = (judge(completion=completion, **columns) for completion in completions)
        return await asyncio.gather(*calls, return_exceptions=True)

    return [str(one) if isinstance(one, JudgeError) else one for one in asyncio.run(ask_all())]


def test_score_is_a_share_of_the_scale(server: JudgeServer) -> None:
    assert ask(make(server), "good", "bad", "twice", "fails once") == [0.8, 0.0, 0.65, 1.0]
    assert ask(make(server, lowest=5.0), "good", "bad")[0] == 0.6
    words = make(server, pattern=r"Verdict: (\w+)", scores={"yes": 10, "no": 0})
    answers = ask(words, "yes", "good")
    assert answers[0] == 1.0 and "has no score" in answers[1]


def test_request_has_rubric_columns_and_further_keys(server: JudgeServer) -> None:
    judge = make(
        server,
        "Question {prompt}, right is {answer}. {{JSON}}\n{turns}: {completion}",
        system="Be strict.",
        request={"max_tokens": 5, "temperature": None},
    )
    turns = [{"role": "assistant", "content": "4 {x}"}]
    (result,) = asyncio.run(_gather(judge(completion="good", prompt="2+2", answer="4", turns=turns)))
    assert result == 0.8
    assert server.requests == [
        {
            "model": "judge",
            "max_tokens": 5,
            "messages": [
                {"role": "system", "content": "Be strict."},
                {"role": "user", "content": "Question 2+2, right is 4. {JSON}\nassistant: 4 {x}: good"},
            ],
        }
    ]


async def _gather(*calls: Any) -> list[Any]:
    return await asyncio.gather(*calls)


@pytest.mark.long
def test_what_is_no_judgement_is_an_error(server: JudgeServer) -> None:
    judge = make(server, max_retries=1)
    messages = {
        "nonsense": "the judge's answer has no score from 0 to 10: 'I would rather not say.'",
        "off the scale": "has no score from 0 to 10",
        "negative": "has no score from 0 to 10",
        "silent": "the judge's answer has no text",
        "cut": "was cut at the limit on its tokens",
        "a page": "answered something else than a chat completion: '<html>'",
        "fails": "gave no answer in 2 attempts; the last: HTTP 500",
        "busy": "gave no answer in 2 attempts; the last: HTTP 429",
        "refused": "refused the request, HTTP 401",
    }
    for (deed, message), answer in zip(messages.items(), ask(judge, *messages), strict=True):
        assert isinstance(answer, str) and message in answer, deed
    (late,) = ask(make(server, max_retries=1, request_timeout=0.5), "hangs")
    assert "gave no answer in 2 attempts; the last: no answer in 0.5 s" in late
    server.close()
    assert "ConnectError" in ask(make(server, max_retries=0), "good")[0]
    assert math.isnan(judge.parse("no")) and judge.parse("Score: 1.5") == 1.5 and math.isnan(judge.parse("Score: 1,5"))


@pytest.mark.long
def test_requests_at_once_are_bounded(server: JudgeServer) -> None:
    assert ask(make(server, max_concurrent=3), *(f"three {i}" for i in range(12))) == [1.0] * 12
    assert server.most_at_once == 3


def test_cache_answers_what_was_asked_before(server: JudgeServer, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "answers.sqlite"
    for num_requests in (2, 2):
        assert ask(make(server, cache=str(path)), "good", "bad") == [0.8, 0.0]
        assert len(server.requests) == num_requests
    ask(make(server, "Be kind: {completion}", cache=str(path)), "good")
    ask(make(server, cache=str(path), max_retries=0), "fails")
    assert len(server.requests) == 4
    ask(make(server, cache=str(path), max_retries=0), "fails")
    assert len(server.requests) == 5, "a failure is not kept"


@pytest.mark.long
def test_repeated_calls_ask_the_api_again_for_their_noise(
    make_runner: MakeRunner,
    server: JudgeServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Past the cache, which would return the first answers, and keeps them."""
    monkeypatch.setattr(reward_runner, "REPEAT_SECONDS", PATIENCE_SECONDS)
    judge = make(server, cache=str(tmp_path / "answers.sqlite"))
    runner = make_runner(RewardFunction(judge, timeout=60.0))
    trajectories = make_trajectories(["differs", "good", "bad"])
    for num_requests in (6, 9):
        scores = runner.score(trajectories).components
        runner.check_repeats(trajectories, scores, 1800.0)
        runner.close()
        assert "gave 1 of 3 completions another result" in caplog.text
        assert len(server.requests) == num_requests
        caplog.clear()


def test_cache_keeps_scores_alone_and_asks_equal_requests_once(server: JudgeServer, tmp_path: Path) -> None:
    path = str(tmp_path / "answers.sqlite")
    assert ask(make(server, cache=path), *["good"] * 5, "bad") == [0.8] * 5 + [0.0]
    assert len(server.requests) == 2
    for num_requests in (3, 4):
        assert all("has no score" in one for one in ask(make(server, cache=path), "nonsense", "nonsense"))
        assert len(server.requests) == num_requests
    assert all("500" in one for one in ask(make(server, cache=path, max_retries=0), "fails", "fails"))
    assert len(server.requests) == 5


def test_key_is_in_no_copy_and_no_message(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    judge = make(server, api_key_variable="JUDGE_KEY")
    caplog.set_level(logging.DEBUG)
    (refused,) = ask(judge, "refused")
    assert server.keys == [f"Bearer {KEY}"] and "no judgement for Bearer ${ENV:JUDGE_KEY}" in refused
    assert KEY not in caplog.text and KEY.encode() not in pickle.dumps(judge) and KEY not in repr(vars(judge))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rubric": "Is it good?"}, "shows the judge nothing of the sample"),
        ({"rubric": "{completion"}, "cannot be read: expected '}' before end of string"),
        ({"rubric": "{completion.text}"}, r"\{completion\.text\} is no name"),
        ({"rubric": "{completion} {}"}, r"\{\} is no name"),
        ({"base_url": "localhost:8000"}, "must begin with http"),
        ({"lowest": 10.0}, "lowest=10.0 must be below highest=10.0"),
        ({"max_concurrent": 0}, "must be at least 1"),
        ({"max_retries": -1}, "must be at least 0"),
        ({"request_timeout": 0.0}, "must be a number of seconds above 0"),
        ({"pattern": "("}, "is no regular expression"),
        ({"api_key_variable": "NO_SUCH_KEY"}, "environment variable NO_SUCH_KEY, which api_key_variable names"),
        ({"cache": "/dev/null/x"}, "cannot hold answers"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(arguments: dict[str, Any], message: str) -> None:
    judge = Judge(**{"rubric": RUBRIC, "model": "judge", **arguments})
    with pytest.raises(ConfigError, match=message):
        judge.check_arguments()


@pytest.mark.processes
def test_sample_that_is_not_judged_has_no_reward(
    server: JudgeServer, make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    judge = Judge(
        "{answer}: {completion}",
        model="judge",
        base_url=f"{server.url}/v1",
        max_retries=0,
        api_key_variable="JUDGE_KEY",
    )
    runner = make_runner(RewardFunction(judge, weight=2.0), "sample_rewards.length")
    (bound, _) = runner.functions
    assert bound.name == "judge" and bound.pickled and bound.required == ("answer",) and bound.timeout > 60
    with pytest.raises(ConfigError, match="Reward 'judge' needs the column 'answer'"):
        runner.check(["question"], "a file")
    scores = score(runner, ["good", "nonsense", "bad", "refused"], answer=["a"] * 4)
    assert values(scores.components["judge"]) == [0.8, None, 0.0, None]
    assert [value is None for value in values(scores.rewards)] == [False, True, False, True] and scores.failed == 2


@pytest.mark.processes
def test_run_names_its_judge_in_yaml(
    server: JudgeServer, project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    write_sums(project)
    judge = {"rubric": RUBRIC, "model": "judge", "base_url": f"{server.url}/v1", "api_key_variable": "JUDGE_KEY"}
    rewards = [{"function": {"class_path": "rlightning.rewards.judge.Judge", "init_args": judge}, "weight": 0.5}]
    config = {
        "model": {"class_path": "GRPO", "init_args": {"model": "model", "rewards": rewards, "prompts_per_step": 2}},
        "rollout": {"class_path": "TransformersRollout", "init_args": {"max_new_tokens": 4}},
        "data": {"train": "sums.jsonl", "max_prompt_tokens": 16},
        "trainer": {"accelerator": "cpu", "max_steps": 1, "default_root_dir": "run"},
    }
    (project / "run.json").write_text(json.dumps(config))
    code, errors = fit_here(capsys, "--config", "run.json")
    assert code == 0, errors
    assert len(server.requests) == 16 + 8 and set(server.keys) == {f"Bearer {KEY}"}
    files = [file for file in (project / "run").rglob("*") if file.is_file()]
    assert files and not [file for file in files if KEY.encode() in file.read_bytes()]
    code, errors = fit_here(capsys, "--config", "run.json", "--trainer.default_root_dir", "other")
    assert code == 0, errors
    rewards[0]["function"]["init_args"]["max_concurrent"] = "many"  # type: ignore[index]
    (project / "run.json").write_text(json.dumps(config))
    code, errors = fit_here(capsys, "--config", "run.json")
    assert code == 2 and errors.splitlines()[-1].endswith("max_concurrent: expected int, got 'many'"), errors
