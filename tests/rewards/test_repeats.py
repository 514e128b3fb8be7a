"""Reward functions are asked twice before the first update."""

import itertools
import logging
import math
import threading
from concurrent.futures import wait
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
from rlightning.rewards.repeats import Repeat, describe_repeat
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
    assert describe_repeat("judge", repeat, values, num_parallel=4, deadline=30.0) is None
    # Two rounds took 4 s, and ten are needed.
    line = describe_repeat("judge", repeat, values, num_parallel=4, deadline=19.0)
    assert (
        line is not None and "the 40 of a step, 4 at once, take more than 20 s, and other ranks wait for 19 s" in line
    )


def test_repeat_of_a_slow_function_is_waited_for_briefly(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    numbers, slow_calls = itertools.count(), itertools.count()

    async def slow(completion: str) -> float:
        import asyncio

        await asyncio.sleep(0 if next(slow_calls) < 10 else 3600)
        return float(len(completion))

    @in_this_process
    def counted(completion: str) -> float:
        return float(next(numbers))

    runner = make_runner(
        RewardFunction(slow, timeout=60.0, name="slow"), RewardFunction(counted), RewardFunction(counted, 0.0, "logged")
    )
    trajectories = make_trajectories(["a" * n for n in range(10)])
    scores = runner.score(trajectories).components
    waits: list[float] = []

    def wait_at_leisure(calls: Any, timeout: float) -> Any:
        waits.append(timeout)
        return wait(calls, 0.0 if len(waits) == 1 else PATIENCE_SECONDS)  # for the slow one, and for the other

    monkeypatch.setattr(reward_runner, "wait", wait_at_leisure)
    runner.check_repeats(trajectories, scores, 1800.0)
    assert len(waits) == 2 and sum(waits) < 1
    lines = [record.getMessage() for record in caplog.records if "asked again" in record.getMessage()]
    assert len(lines) == 1 and lines[0].startswith("Reward 'counted': asked again, it gave 8 of 8 completions another")
    caplog.clear()
    runner.check_repeats([], {name: torch.zeros(0) for name in scores}, 1800.0)
    assert "Reward" not in caplog.text


def test_late_calls_are_cancelled_and_blame_no_other_function(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are asked one after another."""
    started, ended, is_asked_again = threading.Event(), threading.Event(), threading.Event()

    @in_this_process
    async def waiting(completion: str) -> float:
        import asyncio

        if is_asked_again.is_set():
            try:
                started.set()
                await asyncio.Event().wait()
            finally:
                ended.set()
        return float(len(completion))

    @in_this_process
    def quick(completion: str) -> float:
        return float(len(completion))

    runner = make_runner(RewardFunction(waiting, timeout=60.0), RewardFunction(quick))
    trajectories = make_trajectories(["a" * n for n in range(10)])
    scores = runner.score(trajectories).components
    is_asked_again.set()
    submit, events = runner._submit, list[tuple[str, int]]()

    def submit_noted(function: int, trajectory: Any) -> Any:
        events.append(("begun", function))
        call = submit(function, trajectory)
        call.add_done_callback(lambda _: events.append(("over", function)))
        return call

    def wait_until_started(calls: Any, timeout: float) -> Any:
        if started.is_set():
            return wait(calls, PATIENCE_SECONDS)  # for the quick one
        assert started.wait(PATIENCE_SECONDS)
        return wait(calls, timeout)

    monkeypatch.setattr(reward_runner, "wait", wait_until_started)
    monkeypatch.setattr(runner, "_submit", submit_noted)
    runner.check_repeats(trajectories, scores, 1800.0)
    assert ended.wait(PATIENCE_SECONDS), "a late call goes on"
    assert events[:16] == [("begun", 0)] * 8 + [("over", 0)] * 8
    assert {function for _, function in events[16:]} == {1}


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
