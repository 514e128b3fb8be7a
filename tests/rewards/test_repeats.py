"""Reward functions are asked twice before the first update."""

import itertools
import logging
import math
import re
import threading
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from scoring import MakeRunner, make_trajectories
from tiny import in_this_process, make_algorithm, make_data, make_grpo, make_trainer, share_of_ones
from waiting import PATIENCE_SECONDS

from rlightning.algorithms import GRPO
from rlightning.rewards import RewardFunction
from rlightning.rewards import runner as reward_runner
from rlightning.rewards.calls import RewardResult
from rlightning.rewards.repeats import Repeat, describe_noise, describe_repeat
from rlightning.types import RolloutBatch


def describe(first: list[float], again: list[float | None], seconds: float = 0.1, **options: Any) -> str | None:
    repeat = Repeat(first, [RewardResult(value) for value in again], seconds)
    return describe_repeat("judge", repeat, first, **{"num_parallel": 4, "deadline": 100.0} | options)


def test_equal_results_that_differ_over_completions_say_nothing() -> None:
    assert describe([0.0, 1.0, math.nan], [0.0, 1.0 + 1e-12, None]) is None


def test_noise_is_measured_from_pairs() -> None:
    line = describe([0.0, 1.0, 0.5, 0.5], [0.2, 1.0, 0.5, 0.3])
    # Differences of 0.2, 0, 0, 0.2: twice the variance is 0.08 / 4.
    assert line is not None and "gave 2 of 4 completions another result, up to 0.2 apart" in line
    assert "a standard deviation of 0.1 from call to call" in line


def test_a_result_that_is_there_only_once_differs() -> None:
    line = describe([0.0, 1.0], [0.0, None])
    assert line is not None and "gave 1 of 2 completions another result" in line


def test_result_that_is_there_only_once_has_no_distance() -> None:
    line = describe([0.0, 1.0, 0.5, math.nan], [0.0, None, 0.7, 1.0])
    # Pairs of numbers: differences of 0 and 0.2, twice the variance is 0.04 / 2.
    assert line is not None and "gave 3 of 4 completions another result, 2 of them a reward in only one of the" in line
    assert "up to 0.2 apart, a standard deviation of 0.1 from" in line
    line = describe([0.0, 1.0], [0.0, None])
    assert line is not None and "apart" not in line and "deviation" not in line


def test_failed_second_calls_are_no_noise() -> None:
    first, late = [0.0, 1.0, 0.5, math.nan], "TimeoutError: the reward function took more than its timeout=60 s"
    again = [RewardResult(0.0), RewardResult.failed(late), RewardResult.failed("Traceback\nKeyError: 'x'")]
    repeat = Repeat(first, [*again, RewardResult.failed("ValueError: as the first one")], 0.1)
    assert describe_noise("judge", repeat) == (
        f"Reward 'judge': 2 of 4 second calls failed, unlike the first ones: {late}. model.check_rewards: false leaves "
        "this check out."
    )


def test_call_that_raised_has_failed_and_is_not_late() -> None:
    raised, waiting, cancelled = Future[RewardResult](), Future[RewardResult](), Future[RewardResult]()
    raised.set_exception(OSError("the pool is broken"))
    cancelled.cancel()
    failed, *others = reward_runner.read_results([raised, waiting, cancelled])
    assert failed is not None and failed.error == "OSError: the pool is broken" and others == [None, None]


def test_results_that_are_all_equal_are_named() -> None:
    assert describe([0.5, 0.5, math.nan], [0.5, 0.5, None]) == (
        "Reward 'judge': it gave all 2 completions of the first step 0.5, from which nothing can be learned. "
        "model.check_rewards: false leaves this check out."
    )


def test_results_are_compared_over_all_ranks() -> None:
    """Each rank has another share of a step's completions."""
    assert describe([0.5, 0.5], [0.5, 0.5], everywhere=[0.5, 0.5, math.nan, 1.0]) is None
    line = describe([0.5], [0.5], everywhere=[0.5, math.nan, 0.5])
    assert line is not None and "gave all 2 completions of the first step 0.5" in line


def test_step_longer_than_others_wait_is_named() -> None:
    values = [0.0, 1.0] * 20
    repeat = Repeat(values[:8], [RewardResult(value) for value in values[:7]] + [None], 4.0)
    assert describe_repeat("judge", repeat, values, num_parallel=4, deadline=30.0, is_final=False) is None
    # Two rounds took 4 s, and ten are needed.
    line = describe_repeat("judge", repeat, values, num_parallel=4, deadline=19.0)
    assert (
        line is not None and "the 40 of a step, 4 at once, take more than 20 s, and other ranks wait for 19 s" in line
    )


def test_late_calls_are_awaited_until_a_later_step(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of an async function; nothing waits for them, and they blame no other function."""
    goes_on, is_asked_again, ended = threading.Event(), threading.Event(), list[float]()
    numbers = itertools.count()

    @in_this_process
    async def slow(completion: str) -> float:
        import asyncio

        while is_asked_again.is_set() and not goes_on.is_set():
            await asyncio.sleep(0.01)
        ended.append(len(completion) + (0.5 if is_asked_again.is_set() else 0.0))
        return ended[-1]

    @in_this_process
    def counted(completion: str) -> float:
        return float(next(numbers))

    runner = make_runner(
        RewardFunction(slow, timeout=60.0, name="slow"), RewardFunction(counted), RewardFunction(counted, 0.0, "logged")
    )
    trajectories = make_trajectories(["a" * n for n in range(10)])
    scores = runner.score(trajectories).components
    is_asked_again.set()
    waits: list[float] = []

    def wait_at_leisure(calls: Any, timeout: float) -> Any:
        waits.append(timeout)
        return wait(calls, 0.0 if len(waits) == 1 else PATIENCE_SECONDS)  # for the slow one, and for the other

    monkeypatch.setattr(reward_runner, "wait", wait_at_leisure)
    runner.check_repeats(trajectories, scores, 1800.0)
    assert len(waits) == 2 and sum(waits) < 1
    (line,) = lines_of(caplog)
    assert line.startswith("Reward 'counted': asked again, it gave 8 of 8 completions another")
    calls = runner._late_repeats[0].calls
    goes_on.set()
    wait(calls, PATIENCE_SECONDS)
    runner.score(trajectories)
    (line,) = lines_of(caplog)
    assert line.startswith("Reward 'slow': asked again, it gave 8 of 8 completions another result, up to 0.5 apart")
    runner.check_repeats([], {name: torch.zeros(0) for name in scores}, 1800.0)
    assert lines_of(caplog) == []


@pytest.mark.parametrize("is_async", [True, False])
def test_calls_that_do_not_return_leave_the_noise_unknown_which_is_said(
    is_async: bool, make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_asked_again, ended = threading.Event(), threading.Event()

    @in_this_process
    async def waiting(completion: str) -> float:
        import asyncio

        if is_asked_again.is_set():
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
        return float(len(completion))

    @in_this_process
    def blocking(completion: str) -> float:
        return float(len(completion)) if not is_asked_again.is_set() else float(ended.wait(PATIENCE_SECONDS))

    @in_this_process
    def quick(completion: str) -> float:
        return float(len(completion))

    late = RewardFunction(waiting if is_async else blocking, timeout=PATIENCE_SECONDS, name="late")
    runner = make_runner(late, RewardFunction(quick))
    trajectories = make_trajectories(["a" * n for n in range(10)])
    scores = runner.score(trajectories).components
    is_asked_again.set()
    is_first = itertools.chain([True], itertools.repeat(False))
    monkeypatch.setattr(
        reward_runner, "wait", lambda calls, timeout: wait(calls, 0.05 if next(is_first) else PATIENCE_SECONDS)
    )
    runner.check_repeats(trajectories, scores, 1800.0)
    said = lines_of(caplog)
    ended.set() if not is_async else None
    runner.close()
    said += lines_of(caplog)
    unknown = "how much its results differ from call to call is unknown"
    assert re.search(rf"^Reward 'late': 8 of 8 second calls had not returned after \S+ s: {unknown}", said[0])
    # The processes of sync functions are still occupied by the late one's calls.
    others = [f"Reward 'quick': it was not asked again, as another function's late calls were still running: {unknown}"]
    assert [line.partition(". model")[0] for line in said[1:]] == ([] if is_async else others)
    assert ended.wait(PATIENCE_SECONDS), "a late call goes on"


numbers = itertools.count()


@in_this_process
async def noisy(completion: str) -> float:
    return float(next(numbers))


class RefillOnce(GRPO):
    """Drops each step's first group, and takes another prompt in its place."""

    max_refills = 1

    def keep_sequences(self, batch: RolloutBatch) -> torch.Tensor:
        return torch.tensor([prompt.index % 4 != 0 for prompt in batch.prompts])


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log lines about repeated calls since the last call."""
    lines = [record.getMessage() for record in caplog.records if "check_rewards" in record.getMessage()]
    caplog.clear()
    return lines


@pytest.mark.parametrize(
    ("algorithm", "options", "is_asked"),
    [(GRPO, {}, True), (GRPO, {"check_rewards": False}, False), (RefillOnce, {}, True)],
)
def test_a_run_asks_once_before_its_first_update(
    algorithm: type[GRPO],
    options: dict[str, Any],
    is_asked: bool,
    model_folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(reward_runner, "REPEAT_SECONDS", PATIENCE_SECONDS)
    caplog.set_level(logging.WARNING)
    module = make_algorithm(algorithm, model_folder, rewards=[share_of_ones, RewardFunction(noisy)], **options)
    make_trainer(tmp_path, 2).fit(module, make_data(tmp_path))
    assert ["noisy" in line for line in lines_of(caplog)] == [True] * is_asked


def test_a_resumed_run_does_not_ask_again(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reward_runner, "REPEAT_SECONDS", PATIENCE_SECONDS)
    caplog.set_level(logging.WARNING)
    for max_steps, num_lines, saved in ((1, 1, None), (2, 0, tmp_path / "first.ckpt")):
        trainer = make_trainer(tmp_path, max_steps)
        module = make_grpo(model_folder, rewards=[share_of_ones, RewardFunction(noisy)], validate_first=False)
        trainer.fit(module, make_data(tmp_path), ckpt_path=saved)
        trainer.save_checkpoint(tmp_path / "first.ckpt")
        assert len(lines_of(caplog)) == num_lines and module.weight_version == max_steps
