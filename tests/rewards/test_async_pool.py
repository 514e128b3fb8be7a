"""Async reward functions in their process: one event loop, and calls that block it, end it or leave it behind."""

import logging
import os
from pathlib import Path

import judges
import pytest
from scoring import MakeRunner, make_trajectories, score, values
from waiting import is_running, wait_for

from rlightning.rewards import RewardFunction

pytestmark = pytest.mark.processes


def test_modules_client_serves_all_batches_on_one_loop(make_runner: MakeRunner) -> None:
    runner = make_runner("judges.count_loops", judges.process_id, max_failed_share=0.0)
    scores = [score(runner, ["a"] * 8) for _ in range(3)]
    assert [values(s.components["count_loops"]) for s in scores] == [[1.0] * 8] * 3
    (process,) = {pid for s in scores for pid in s.components["process_id"].tolist()}
    assert process != os.getpid() and not judges.client.loops
    runner.close()
    assert not is_running(int(process))
    again = score(runner, ["a"] * 8)
    assert values(again.components["count_loops"]) == [1.0] * 8, "of another process, whose module is another"


BLOCKED = "blocked its event loop for more than its timeout=3 s"
FAILURES = [
    # The slow call begins again in the process that replaces the first; what a thread ended does so too, alone.
    ("block", BLOCKED, "in misbehave", 1),
    ("backtrack in a thread", BLOCKED, "", 2),
    ("exit in a thread", "ProcessDied: the reward function ended its process (exit code 4)", "", 2),
    ("crash", "ProcessDied: the reward function ended its process (SIGABRT)", "in misbehave", 1),
]
"""Deeds of ``judges.misbehave``: what the error says, a frame in it, and how often the call begins."""


def test_call_ending_or_blocking_process_costs_its_sample(make_runner: MakeRunner, tmp_path: Path) -> None:
    """One runner: its process is replaced again and again."""
    runner = make_runner(RewardFunction("judges.misbehave", timeout=3.0), judges.judge)
    for deed, message, frame, num_calls in FAILURES:
        folder = tmp_path / deed
        folder.mkdir()
        completions = ["a", "slow", deed, "c", "d"]
        outcomes = [runner._pool.submit(0, {"completion": c, "folder": str(folder)}) for c in completions]
        judged = [runner._pool.submit(1, {"completion": c}) for c in completions]
        results = [outcome.result() for outcome in outcomes]
        assert [result.value for result in results] == [1.0, 1.0, None, 1.0, 1.0], deed
        assert [outcome.result().value for outcome in judged] == [1.0] * 5, deed
        error = results[2].error or ""
        assert message in error and frame in error, deed
        assert len(list(folder.glob(f"{deed}.*"))) == num_calls and len(list(folder.glob("slow.*"))) == 2, deed
    assert score(runner, ["a", "exit", "c"], folder=[str(tmp_path)] * 3).failed == 1


def test_functions_behind_decorators_run_on_the_one_loop(make_runner: MakeRunner) -> None:
    runner = make_runner(
        RewardFunction("judges.retried", timeout=2.0), judges.run_to_its_end, judges.end_oddly, judges.count_loops
    )
    for _ in range(2):
        scores = score(runner, ["a", "raise", "sleep", "exit", "cancel"])
        assert values(scores.components["retried"]) == [1.0, None, None, 1.0, 1.0]
        assert values(scores.components["run_to_its_end"]) == [1.0] * 5
        assert values(scores.components["end_oddly"]) == [1.0, 1.0, 1.0, None, None]
        assert values(scores.components["count_loops"]) == [1.0] * 5


def test_unpicklable_object_is_sent_by_its_path(make_runner: MakeRunner) -> None:
    runner = make_runner("judges.locked.score", "judges.locked.score_async", max_failed_share=0.0)
    assert all(function.pickled for function in runner.functions)
    assert values(score(runner, ["a", "b"]).rewards) == [3.0, 3.0]


@pytest.mark.parametrize("is_sent", [True, False])
def test_close_and_withdrawal_let_calls_clean_up(make_runner: MakeRunner, tmp_path: Path, is_sent: bool) -> None:
    function = judges.hold_unless if is_sent else judges.unsendable(judges.hold_unless)
    runner = make_runner(RewardFunction(function, timeout=3600.0))
    trajectories = make_trajectories(["wait", "go"], folder=[str(tmp_path)] * 2)
    runner.begin(trajectories)
    wait_for(lambda: (tmp_path / "begun").exists())
    assert runner.score(trajectories[1:]).failed == 0
    wait_for(lambda: (tmp_path / "cleaned up").exists())
    (tmp_path / "begun").unlink()
    (tmp_path / "cleaned up").unlink()
    runner.begin(trajectories)
    wait_for(lambda: (tmp_path / "begun").exists())
    runner.close()
    assert (tmp_path / "cleaned up").exists(), "closing waits for it"


def test_end_closes_tasks_and_generators_in_order(make_runner: MakeRunner, tmp_path: Path) -> None:
    runner = make_runner(judges.leave_behind)
    assert score(runner, [""], folder=[str(tmp_path)]).failed == 0
    runner.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["generator ended", "task ended"]


@pytest.mark.parametrize("is_async", [False, True])
def test_function_that_cannot_be_sent_is_named_once(
    make_runner: MakeRunner,
    caplog: pytest.LogCaptureFixture,
    is_async: bool,
) -> None:
    async def judge(completion: str) -> float:
        return os.getpid()

    with caplog.at_level(logging.WARNING):
        runner = make_runner(judge if is_async else (lambda completion: os.getpid()), judges.process_id)
        components = [score(runner, [""]).components for _ in range(2)]
    name = "judge" if is_async else "reward"
    said = [record.getMessage() for record in caplog.records if "unprotected" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith(f"Reward '{name}' runs in this process, unprotected")
    assert [c[name].item() == os.getpid() for c in components] == [True, True]
    assert [c["process_id"].item() == os.getpid() for c in components] == [False, False]
