"""The runner with real processes, threads and loops, and functions that hang, crash, raise and talk nonsense."""

import asyncio
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sample_rewards
import torch
from scoring import MakeRunner, make_trajectories, score, values
from waiting import is_running, still_running, wait_for

from rlightning.errors import ConfigError, RewardError
from rlightning.processes import liveness
from rlightning.rewards import RewardFunction, RewardRunner
from rlightning.rpc import background_loop


@pytest.mark.processes
def test_weights_columns_and_every_kind_of_function(make_runner: MakeRunner) -> None:
    runner = make_runner(
        RewardFunction("sample_rewards.length", weight=0.5),
        RewardFunction("sample_rewards.echo"),
        RewardFunction(sample_rewards.wait_then_length, weight=2.0, name="slow"),
        RewardFunction(lambda num_tokens, is_truncated: num_tokens + 10 * is_truncated, weight=-1.0, name="tokens"),
    )
    scores = score(runner, ["a", "bbb"], value=["7", "9"])
    assert values(scores.components["length"]) == [1.0, 3.0]
    assert values(scores.components["echo"]) == [7.0, 9.0]
    assert values(scores.components["slow"]) == [1.0, 3.0]
    assert values(scores.components["tokens"]) == [1.0, 3.0]
    # 0.5 * length + value + 2 * length - length
    assert values(scores.rewards) == [8.5, 13.5]
    assert scores.rewards.dtype == torch.float64
    assert scores.failed == 0


def test_score_sums_weighted_rewards_in_float64(make_runner: MakeRunner) -> None:
    runner = make_runner(
        RewardFunction(lambda one: one, weight=3.0, name="one"), RewardFunction(lambda other: other, name="other")
    )
    # In float32 the first would be 99.90000153.
    scores = score(runner, ["", ""], one=[33.3, 10.0], other=[0.0, 69.9])
    assert scores.rewards.tolist() == pytest.approx([99.9, 99.9], rel=1e-15)


def test_score_total_beyond_the_limit_fails_the_sample(make_runner: MakeRunner) -> None:
    runner = make_runner(RewardFunction(lambda value: value, weight=2.0, name="large"))
    large = [5e11, -5e11, 5.1e11, -5.1e11, 1e20, 1e39, 1e308]
    scores = score(runner, [""] * 8, value=[1.0, *large])
    assert values(scores.rewards) == [2.0, 1e12, -1e12, None, None, None, None, None]
    assert scores.failed == 5


def test_full_text_is_prompt_and_completion(make_runner: MakeRunner) -> None:
    runner = make_runner(RewardFunction(lambda full_text: float(full_text == "prompt 0abc"), name="whole"))
    assert values(score(runner, ["abc"]).rewards) == [1.0]


@pytest.mark.processes
def test_unstarted_runner_can_be_pickled(make_runner: MakeRunner) -> None:
    runner = pickle.loads(pickle.dumps(make_runner(sample_rewards.length)))
    try:
        assert runner.score(make_trajectories(["abc"])).rewards.tolist() == [3.0]
    finally:
        runner.close()


@pytest.mark.processes
def test_none_reward_is_skipped_all_none_fails_sample(make_runner: MakeRunner) -> None:
    runner = make_runner("sample_rewards.maybe", RewardFunction(lambda other: other, weight=3.0, name="other"))
    scores = score(runner, ["", "", ""], value=[1.0, None, None], other=[2.0, 2.0, None])
    assert values(scores.rewards) == [7.0, 6.0, None]
    assert values(scores.components["maybe"]) == [1.0, None, None]
    assert scores.failed == 1


FAILURES = {
    "raise": "ValueError: a reward that raises",
    "exit": "ended its process (exit code 3)",
    "sleep": "took more than its timeout=3 s",
    "sys.exit": "SystemExit: 0",
    "backtrack": "took more than its timeout=3 s",
    "stop": "took more than its timeout=3 s",
    "nan": "a reward must be finite, this one is nan",
    "child": "took more than its timeout=3 s",
    "inf": "a reward must be finite, this one is inf",
    "crash": "ended its process (SIGSEGV)",
    "text": "a reward must be a number or None, this one is '1'",
}
"""Deeds of ``sample_rewards.misbehave``, and what their errors say."""


@pytest.mark.processes
def test_a_failure_costs_its_sample_only(make_runner: MakeRunner, caplog: pytest.LogCaptureFixture) -> None:
    """All kinds of failures among 40 samples; those that hang or end their process have it replaced."""
    runner = make_runner(RewardFunction("sample_rewards.misbehave", timeout=3.0), "sample_rewards.length")
    patient = make_runner(RewardFunction("sample_rewards.misbehave", timeout=60.0))
    completions = ["fine", *FAILURES, *["true"] * 28]
    outcomes = {
        deed: (runner if "took more" in message else patient)._pool.submit(0, {"completion": deed})
        for deed, message in FAILURES.items()
    }
    errors = {deed: outcome.result().error or "" for deed, outcome in outcomes.items()}
    assert {deed: error for deed, error in errors.items() if FAILURES[deed] not in error} == {}
    for deed in ("raise", "sleep", "backtrack", "crash"):
        assert "sample_rewards.py" in errors[deed], "with the function's frames"
    with caplog.at_level(logging.WARNING):
        scores = score(runner, completions)
    assert values(scores.rewards) == [5.0] + [None] * len(FAILURES) + [5.0] * 28
    assert values(scores.components["length"]) == [len(completion) for completion in completions]
    assert scores.failed == len(FAILURES)
    assert sum(record.name.startswith("rlightning") for record in caplog.records) == 1, "said once"


@pytest.mark.processes
def test_children_of_a_function_that_hangs_are_ended(make_runner: MakeRunner, tmp_path: Path) -> None:
    runner = make_runner(RewardFunction("sample_rewards.note_and_sleep", timeout=5.0))
    assert score(runner, [""], folder=[str(tmp_path)]).failed == 1
    pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 2
    assert still_running(pids, 300) == []


@pytest.mark.processes
@pytest.mark.parametrize("deed", ["raise", "sleep", "stubborn"])
def test_async_reward_failure_fails_only_its_sample(
    make_runner: MakeRunner, caplog: pytest.LogCaptureFixture, deed: str
) -> None:
    runner = make_runner(RewardFunction(sample_rewards.misbehave_async, timeout=1.0), sample_rewards.wait_then_length)
    scores = score(runner, ["ab", deed, "abc"])
    assert values(scores.rewards) == [3.0, None, 4.0]
    assert ("ValueError: an async reward that raises" if deed == "raise" else "timeout=1 s") in caplog.text


@pytest.mark.long
def test_a_failure_in_a_thread_costs_its_sample_only(make_runner: MakeRunner) -> None:
    def closure(completion: str) -> object:
        return sample_rewards.misbehave(completion)

    runner = make_runner(RewardFunction(closure, timeout=3.0))
    assert values(score(runner, ["fine", "sleep", "raise", "nan", "sys.exit", "true"]).rewards) == [
        1.0, None, None, None, None, 1.0,
    ]  # fmt: skip


def test_async_calls_run_together(make_runner: MakeRunner) -> None:
    all_are_there = asyncio.Barrier(50)

    async def meet() -> float:
        await all_are_there.wait()
        return 1.0

    runner = make_runner(RewardFunction(meet, timeout=60.0))
    assert score(runner, ["a"] * 50).failed == 0


@pytest.mark.processes
def test_too_many_failures_stop_the_run_with_the_traceback(make_runner: MakeRunner) -> None:
    runner = make_runner("sample_rewards.misbehave", max_failed_share=0.25)
    assert score(runner, ["raise", "ok", "ok", "ok"]).failed == 1
    with pytest.raises(RewardError, match=r"samples have no reward, more than max_failed_share=0\.25 allows") as caught:
        score(runner, ["raise", "raise", "ok", "ok"])
    assert str(caught.value).endswith("ValueError: a reward that raises")
    assert score(runner, ["ok"]).failed == 0, "it can be used again"


@pytest.mark.processes
@pytest.mark.parametrize("name", ["misbehave", "misbehave_async"])
def test_long_message_is_cut_where_it_is_quoted(
    make_runner: MakeRunner, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    runner = make_runner(RewardFunction(f"sample_rewards.{name}", timeout=60.0), max_failed_share=0.5)
    with pytest.raises(RewardError) as caught:
        score(runner, ["raise at length"])
    for text in (str(caught.value), *(record.getMessage() for record in caplog.records)):
        assert len(text) < 9000 and "ValueError: begin xxx" in text and "characters left out" in text
        assert text.endswith(r"xxx end \ud800")


@pytest.mark.processes
@pytest.mark.parametrize("name", ["reject_key", "reject_key_async"])
def test_secrets_are_left_out_of_what_a_reward_raises(
    make_runner: MakeRunner, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("JUDGE_HEADER", "in-the-header")
    arguments = {"api_key": "sk-in-the-config", "header": "Bearer ${ENV:JUDGE_HEADER}", "digits": "0123"}
    function = RewardFunction(f"sample_rewards.{name}", arguments=arguments, timeout=60.0)
    with pytest.raises(RewardError) as caught:
        score(make_runner(function, max_failed_share=0.5), ["a"])
    for text in (str(caught.value), *(record.getMessage() for record in caplog.records)):
        assert (
            "RuntimeError: 401 " in text
            and "key ${ENV:API_KEY} for" in text
            and "sk-in" not in text
            and "in-the" not in text
        )
    if name == "reject_key_async":  # the other's is cut there
        assert "'header': 'Bearer ${ENV:JUDGE_HEADER}', 'digits': '0123'}" in str(caught.value)


@pytest.mark.processes
def test_many_hangs_stop_the_run_soon(make_runner: MakeRunner, tmp_path: Path) -> None:
    runner = make_runner(RewardFunction("sample_rewards.note_and_sleep", timeout=1.0), max_failed_share=0.02)
    with pytest.raises(RewardError, match=r"timeout=1 s$"):
        score(runner, [""] * 120, folder=[str(tmp_path)] * 120)
    assert len(list(tmp_path.glob("*.pid"))) < 80  # two of each call: most were never begun


@pytest.mark.processes
def test_reward_arriving_during_trainer_stall_still_counts(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stall begins with the calls, and the clock that counts silence says that it took a day."""
    runner = make_runner(RewardFunction("sample_rewards.length", timeout=60.0), num_workers=1)
    assert score(runner, [""]).failed == 0, "the worker is there"
    trajectories = make_trajectories(["a", "bb", "ccc"])
    stall, is_over = threading.Event(), threading.Event()

    def stall_loop() -> None:
        stall.set()
        is_over.wait()

    background_loop().loop.call_soon_threadsafe(stall_loop)
    assert stall.wait(60)
    runner.begin(trajectories)
    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 86400, sleep=time.sleep))
    is_over.set()
    assert values(runner.score(trajectories).rewards) == [1.0, 2.0, 3.0]


@pytest.mark.processes
def test_workers_are_kept_apart_light_and_used_again(make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("START_BY_EXEC", "1")  # a fork of the fork server has imported torch
    runner = make_runner("sample_rewards.process_id", "sample_rewards.heavy_modules")
    first = score(runner, [""] * 40).components
    again = score(runner, [""] * 40).components
    pids = set(first["process_id"].tolist())
    assert os.getpid() not in pids
    assert len(pids | set(again["process_id"].tolist())) <= 2
    assert first["heavy_modules"].sum() == 0


@pytest.mark.processes
def test_a_worker_that_dies_between_two_batches_costs_nothing(make_runner: MakeRunner) -> None:
    runner = make_runner("sample_rewards.process_id", num_workers=1)
    pid = int(score(runner, [""]).rewards.item())
    os.kill(pid, 9)
    wait_for(lambda: not is_running(pid))
    assert score(runner, ["", ""]).failed == 0


@pytest.mark.processes
def test_close_leaves_no_process(make_runner: MakeRunner) -> None:
    runner = make_runner("sample_rewards.process_id")
    pids = {int(pid) for pid in score(runner, [""] * 40).rewards.tolist()}
    assert all(is_running(pid) for pid in pids)
    runner.close()
    runner.close()
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.processes
def test_a_killed_trainer_takes_its_workers_with_it(tmp_path: Path) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from scoring import score\n"
        "from rlightning.rewards import RewardFunction, RewardRunner\n"
        "runner = RewardRunner([RewardFunction('sample_rewards.note_and_sleep', timeout=60.0)], num_workers=2)\n"
        "score(runner, ['', ''], folder=[sys.argv[2]] * 2)\n"
    )
    with subprocess.Popen([sys.executable, script, Path(__file__).parent, tmp_path]) as trainer:
        wait_for(lambda: len(list(tmp_path.glob("*.pid"))) == 4)
        trainer.kill()
    pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert still_running(pids, 300) == []


@pytest.mark.processes
def test_reward_import_error_in_worker_fails_its_samples(
    make_runner: MakeRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fleeting_rewards.py").write_text(
        "from pathlib import Path\n"
        "if not (Path(__file__).parent / 'cases').exists():\n    raise OSError('no access to the test cases')\n"
        "def f(completion):\n    return 1.0\n"
    )
    (tmp_path / "cases").touch()
    monkeypatch.syspath_prepend(tmp_path)
    runner = make_runner("fleeting_rewards.f", max_failed_share=0.5)
    (tmp_path / "cases").unlink()
    with pytest.raises(RewardError, match=r"no access to the test cases$"):
        score(runner, ["a", "b"])


def test_score_without_functions_is_refused() -> None:
    runner = RewardRunner([])
    runner.check(["prompt"], "train.jsonl")
    with pytest.raises(ConfigError, match=r"There is no reward function\. Give at least one by model\.rewards"):
        score(runner, ["a"])


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("max_failed_share", 1.5, "is no share. Use a number from 0 to 1"),
        ("max_unrewarded_references", -0.1, "is no share. Use a number from 0 to 1"),
        ("max_unrewarded_references", 1.5, "is no share. Use a number from 0 to 1"),
        ("num_workers", 0, "must be at least 1"),
    ],
)
def test_mistakes_in_the_options(option: str, value: Any, rule: str) -> None:
    with pytest.raises(ConfigError, match=f"{option}={value} {rule}"):
        RewardRunner([], **{option: value})
