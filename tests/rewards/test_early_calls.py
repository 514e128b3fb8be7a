"""Calls of reward functions before a step has all of its trajectories: begun, or awaited for a prompt in flight."""

import asyncio
import pickle
import sys
import threading
from pathlib import Path

import pytest
import sample_rewards
from scoring import MakeRunner, make_trajectories, score, values
from waiting import still_running, wait_for

from rlightning.errors import RewardError
from rlightning.rewards import FailureCount, RewardFunction, RewardRunner
from rlightning.rewards.pool import RewardPool
from rlightning.rpc import background_loop


def noted(folder: Path) -> list[str]:
    """Return the names of the functions called so far, one for each call."""
    return sorted(path.stem for path in folder.iterdir())


def make_noting_runner(make_runner: MakeRunner) -> tuple[RewardRunner, list[str]]:
    """Return a runner of three functions that note their calls, and the list in which one of this process does so."""
    called_here: list[str] = []

    def closure(completion: str) -> float:
        called_here.append(completion)
        return 1.0

    return make_runner("sample_rewards.note", sample_rewards.note_async, closure), called_here


@pytest.mark.processes
def test_begun_calls_run_at_once_and_only_once(make_runner: MakeRunner, tmp_path: Path) -> None:
    runner, called_here = make_noting_runner(make_runner)
    trajectories = make_trajectories(["a", "bb", "ccc", "dddd"], folder=[str(tmp_path)] * 4)
    runner.begin(trajectories[2:])
    wait_for(lambda: noted(tmp_path) == ["async-ccc", "async-dddd", "ccc", "dddd"])
    assert called_here == []  # it would take the interpreter from the collector
    scores = runner.score(trajectories)
    assert values(scores.components["note"]) == [1.0, 2.0, 3.0, 4.0]
    assert values(scores.components["note_async"]) == [7.0, 8.0, 9.0, 10.0]
    assert sorted(called_here) == ["a", "bb", "ccc", "dddd"]
    assert noted(tmp_path) == sorted([*called_here, *(f"async-{text}" for text in called_here)])


@pytest.mark.processes
def test_scores_are_those_without_a_beginning(make_runner: MakeRunner) -> None:
    runner = make_runner(
        RewardFunction("sample_rewards.misbehave", timeout=3.0), RewardFunction("sample_rewards.length", weight=0.5)
    )
    trajectories = make_trajectories(["fine", "raise", "exit", "true", "nan", "sleep", "crash", "none"])
    for order in ([0, 1, 2], [5, 6, 7], [3, 4]):  # in an order of their own, as they end
        runner.begin([trajectories[i] for i in order])
    begun = runner.score(trajectories)
    plain = runner.score(trajectories)
    assert values(begun.rewards) == values(plain.rewards) == [3.0, None, None, 3.0, None, None, None, 2.0]
    assert values(begun.components["length"]) == values(plain.components["length"])
    assert begun.failed == 5


@pytest.mark.processes
def test_what_is_not_asked_for_is_forgotten(make_runner: MakeRunner) -> None:
    runner = make_runner(RewardFunction("sample_rewards.misbehave", timeout=60.0), num_workers=1, max_failed_share=0.0)
    unwanted = make_trajectories(["raise", "ok"] + ["sleep"] * 50)
    runner.begin(unwanted)
    runner.close()  # as an end of the run would, whatever hangs
    runner.begin(make_trajectories(["raise"] * 3))
    trajectories = make_trajectories(["one", "two"])
    runner.begin(trajectories)
    alike = make_trajectories(["one", "two"])  # equal, and yet others
    assert runner.score(alike).failed == 0
    assert runner.score(trajectories[:1] * 2).failed == 0


@pytest.mark.processes
def test_failures_of_started_calls_raise_when_scored(make_runner: MakeRunner) -> None:
    runner = make_runner(RewardFunction("sample_rewards.misbehave", timeout=3600.0), max_failed_share=0.25)
    trajectories = make_trajectories(["raise", "raise", *["sleep"] * 6])
    runner.begin(trajectories[:3])  # one of the two workers stays awake
    with pytest.raises(RewardError, match=r"^at least 3 of 8 samples have no reward"):
        runner.score(trajectories[:1] * 3 + trajectories[3:])  # waits for none that sleeps
    assert score(runner, ["ok"]).failed == 0


@pytest.mark.processes
def test_worker_start_failure_raises_when_scored(make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner("sample_rewards.length")
    trajectories = make_trajectories(["a"])
    with monkeypatch.context() as patch:
        patch.setenv("START_BY_EXEC", "1")
        patch.setattr(sys, "executable", "/bin/false")
        runner.begin(trajectories)
        with pytest.raises(
            RewardError, match=r"A reward worker ended before it was ready \(exit code 1\), while it imported"
        ):
            runner.score(trajectories)
    assert runner.score(trajectories).failed == 0


@pytest.mark.processes
def test_closing_ends_what_was_begun(make_runner: MakeRunner, tmp_path: Path) -> None:
    runner = make_runner(RewardFunction("sample_rewards.note_and_sleep", timeout=60.0))
    runner.begin(make_trajectories([""], folder=[str(tmp_path)]))
    wait_for(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    runner.close()
    pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert still_running(pids, 300) == []
    assert not any(thread.name == "reward workers" for thread in threading.enumerate())


# Groups that are scored before the step that takes them


@pytest.mark.processes
def test_scored_groups_are_not_asked_again(make_runner: MakeRunner, tmp_path: Path) -> None:
    runner, called_here = make_noting_runner(make_runner)
    trajectories = make_trajectories(["a", "bb", "ccc", "dddd"], folder=[str(tmp_path)] * 4)
    asyncio.run(runner.score_group(trajectories[2:]))
    assert noted(tmp_path) == ["async-ccc", "async-dddd", "ccc", "dddd"] and called_here == []
    arrived = pickle.loads(pickle.dumps(trajectories))  # on the rank that trains on them
    runner.begin(arrived)
    scores = runner.score(arrived)
    assert values(scores.components["note"]) == [1.0, 2.0, 3.0, 4.0]
    assert values(scores.components["note_async"]) == [7.0, 8.0, 9.0, 10.0]
    assert sorted(called_here) == ["a", "bb", "ccc", "dddd"]
    assert noted(tmp_path) == sorted([*called_here, *(f"async-{text}" for text in called_here)])
    assert not any(one.reward_results for one in arrived)


@pytest.mark.processes
def test_failures_of_scored_groups_are_counted_at_once(make_runner: MakeRunner) -> None:
    runner = make_runner("sample_rewards.misbehave", max_failed_share=0.25)
    trajectories = make_trajectories(["raise", "ok", "raise", "raise"])
    runner.group_failures = FailureCount(8, 0.25, " of the step")
    with runner.counting(FailureCount(4, 0.25, " of a validation set, which does not change that")):
        asyncio.run(runner.score_group(trajectories[:3]))
        with pytest.raises(RewardError, match=r"^at least 3 of 8 samples of the step have no reward"):
            asyncio.run(runner.score_group(trajectories[3:]))
        scores = runner.score(trajectories[:2])  # counted by themselves
    assert scores.failed == 1 and values(scores.rewards) == [None, 1.0]


@pytest.mark.processes
def test_calls_of_a_closed_pool_are_repeated(make_runner: MakeRunner, tmp_path: Path) -> None:
    runner = make_runner(RewardFunction("sample_rewards.note_and_sleep", timeout=60.0))
    (slow,) = make_trajectories([""], folder=[str(tmp_path)])
    scoring = background_loop().submit(runner.score_group([slow]))
    wait_for(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    runner.close()
    scoring.result(60)
    assert slow.reward_results == {}


@pytest.mark.processes
def test_ranks_scored_at_one_place_get_its_cores(make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlightning.rewards.runner.num_cores", lambda: 12)
    for num_workers, num_ranks, expected in ((2, 1, 2), (2, 4, 8), (2, 8, 12), (16, 4, 16)):
        runner = make_runner("sample_rewards.length", num_workers=num_workers)
        runner.num_ranks = num_ranks
        workers = runner._pool._workers
        assert workers[False].num_workers == expected
        assert (workers[True].num_workers, workers[True].max_calls) == (num_ranks, 64)


@pytest.mark.processes
def test_groups_are_scored_while_a_pool_closes(make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, may_close, is_closing = make_runner("sample_rewards.length"), threading.Event(), threading.Event()
    assert score(runner, ["a"]).failed == 0
    close = RewardPool.close

    def close_late(pool: RewardPool) -> None:
        is_closing.set()
        assert may_close.wait(300)
        close(pool)

    with monkeypatch.context() as patch:
        patch.setattr(RewardPool, "close", close_late)
        closing = threading.Thread(target=runner.close)
        closing.start()
        assert is_closing.wait(300)
        (one,) = make_trajectories(["bb"])
        asyncio.run(runner.score_group([one]))
        may_close.set()
        closing.join()
    assert one.reward_results == {"length": (2.0, None)}
    asyncio.run(runner.score_group([one]))  # the pool that was opened meanwhile goes on
