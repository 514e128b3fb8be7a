"""Async reward functions that cannot be sent to a process of their own: one event loop of this one, and its end."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import judges
import pytest
import sample_rewards
import tiny
from judges import unsendable
from scoring import MakeRunner, score, values
from waiting import in_event_loop, wait_for

from rlightning.algorithms import GRPO
from rlightning.data import ValidationSet
from rlightning.errors import RewardError
from rlightning.rewards import RewardFunction, event_loop


@pytest.fixture(autouse=True)
def new_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judges, "client", judges.Client())


def test_module_level_client_serves_batches_and_runners(make_runner: MakeRunner) -> None:
    judge = unsendable(judges.judge)
    first, second = make_runner(judge, max_failed_share=0.0), make_runner(judge, max_failed_share=0.0)
    for _ in range(3):
        assert score(first, ["a"] * 8).failed == 0
    first.close()
    assert score(first, ["a"] * 8).failed == 0
    assert score(second, ["a"] * 8).failed == 0
    assert len(judges.client.loops) == 1


@pytest.mark.long
def test_module_level_client_serves_fits_and_validations(tmp_path: Path) -> None:
    model = tiny.save_model(tmp_path / "model")
    validation = {"sums": ValidationSet(tiny.write_sums(tmp_path))}
    for _ in range(2):  # the answers are checked before each
        module = GRPO(model, rewards=[unsendable(judges.judge_answer)], prompts_per_step=2, samples_per_prompt=2)
        data = tiny.make_data(tmp_path, validation=validation, validation_batch_size=5)
        tiny.make_trainer(tmp_path, 3).fit(module, data)
        assert module.trainer.callback_metrics["reward/failed"] == 0
        assert module.trainer.callback_metrics["val/sums/reward"] == 1
        tiny.make_trainer(tmp_path, 1).test(module, data, verbose=False)
    assert len(judges.client.loops) == 1


@pytest.mark.long
def test_wrapped_async_functions_run_on_the_one_loop(make_runner: MakeRunner) -> None:
    runner = make_runner(
        RewardFunction(judges.retry(unsendable(judges.retried)), timeout=0.5),
        judges.run(unsendable(judges.wait_briefly)),
    )
    for _ in range(2):
        scores = score(runner, ["a", "raise", "sleep", "b"])
        assert values(scores.components["retried"]) == [1.0, None, None, 1.0]
        assert values(scores.components["wait_briefly"]) == [1.0] * 4
    assert len(judges.client.loops) == 1


@pytest.mark.processes
def test_coroutine_for_a_reward_is_explained(make_runner: MakeRunner) -> None:
    runner = make_runner("judges.forget_to_await", max_failed_share=0.0)
    rule = r"TypeError: a reward must be a number or None, this one is a coroutine, <.*>\. Make it an async def\.$"
    with pytest.raises(RewardError, match=rule):
        score(runner, ["a"])


def test_exit_and_cancellation_in_a_call_cost_their_sample(make_runner: MakeRunner) -> None:
    runner = make_runner(RewardFunction(unsendable(judges.end_oddly), timeout=60.0), unsendable(judges.judge))
    for _ in range(2):
        scores = score(runner, ["fine", "exit", "cancel", "fine"])
        assert values(scores.rewards) == [2.0, None, None, 2.0]
    assert len(judges.client.loops) == 1


@dataclass
class Clock:
    """The time of an event loop, which the test moves on.

    Attributes:
        shift: seconds before the machine's.
    """

    shift: float = 0.0

    def time(self) -> float:
        return time.monotonic() + self.shift


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """Return the clock of the test's own event loop of rewards."""
    clock = Clock()
    monkeypatch.setattr(event_loop, "_threads", [])
    thread = event_loop.free_thread()
    monkeypatch.setattr(thread.loop, "time", clock.time)
    yield clock
    thread.close()


def test_block_by_a_task_costs_its_sample_only(clock: Clock, make_runner: MakeRunner) -> None:
    """The loop is blocked until the block has been found, for longer than others may take: that is not their time."""
    released = threading.Event()

    async def block_in_task(completion: str) -> float:
        async def compute() -> None:
            if completion == "block":
                clock.shift += 90.0
                released.wait()

        await asyncio.gather(compute(), judges.client.ask())
        return 1.0

    runner = make_runner(RewardFunction(block_in_task, timeout=60.0))
    for _ in range(2):
        released.clear()
        outcomes = [runner._pool.submit(0, {"completion": text}) for text in ("a", "b", "block", "c", "d")]
        outcomes[2].add_done_callback(lambda _: released.set())
        assert [outcome.result(600).value for outcome in outcomes] == [1.0, 1.0, None, 1.0, 1.0]
        assert "blocked its event loop for more than its timeout=60 s" in str(outcomes[2].result().error)
    assert len(judges.client.loops) == 1


def test_suspended_process_costs_no_sample(
    clock: Clock, make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All clocks jump; the caller checks the loop before that is free."""
    monkeypatch.setattr(event_loop, "monotonic", clock.time)

    async def stall(completion: str) -> float:
        clock.shift += 90.0
        time.sleep(1.0)
        return 1.0

    runner = make_runner(RewardFunction(stall, timeout=60.0))
    assert values(score(runner, ["a"]).rewards) == [1.0]


@in_event_loop
async def test_block_after_suspension_is_found_in_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suspension, in which both clocks jump, ends before the loop is blocked: none of it counts for the block."""
    caller = Clock()
    monkeypatch.setattr(event_loop, "monotonic", caller.time)
    started, blocks, released = threading.Event(), threading.Event(), threading.Event()

    async def block(completion: str) -> float:
        started.set()
        while not blocks.is_set():
            await asyncio.sleep(0.01)
        blocks.clear()
        released.wait()
        return 1.0

    thread = event_loop.free_thread()
    call = asyncio.ensure_future(thread.execute(block, {"completion": "a"}, 60.0))
    await asyncio.to_thread(started.wait)
    caller.shift += 90.0
    clock.shift += 90.0
    resumed_at = clock.time()
    wait_for(lambda: thread.runner.last_beat >= resumed_at)  # without the caller's loop
    blocks.set()
    wait_for(lambda: not blocks.is_set())
    await asyncio.sleep(0.5)  # the caller's loop polls
    clock.shift += 90.0
    try:
        result = await asyncio.wait_for(call, 60.0)
    finally:
        released.set()
    assert result is not None and "blocked its event loop for more than its timeout=60 s" in str(result.error)


@pytest.mark.long
def test_blocked_loop_serves_again_when_it_is_free(make_runner: MakeRunner) -> None:
    judge = make_runner(unsendable(judges.judge))
    assert score(judge, ["a", "b"]).failed == 0
    sample_rewards.released.clear()
    try:
        runner = make_runner(RewardFunction(unsendable(sample_rewards.misbehave_async), timeout=0.5))
        assert values(score(runner, ["block", "fine"]).rewards) == [None, 1.0]
    finally:
        sample_rewards.released.set()
    wait_for(lambda: not event_loop._threads[0].is_blocked)
    assert score(judge, ["a", "b"]).failed == 0
    assert len(judges.client.loops) == 1


@pytest.mark.processes
def test_process_end_closes_the_loop_in_order(tmp_path: Path) -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from scoring import score\n"
        "from judges import leave_behind, unsendable\n"
        "from rlightning.rewards import RewardRunner\n"
        "runner = RewardRunner([unsendable(leave_behind)])\n"
        f"assert score(runner, [''], folder=[{str(tmp_path)!r}]).failed == 0\n"
        "runner.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["generator ended", "task ended"]
    assert "unprotected" in done.stderr and len(done.stderr.splitlines()) == 1
