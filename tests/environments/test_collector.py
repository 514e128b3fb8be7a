"""What a step takes of what is in flight: the environments answer at once, or not at all; no engine is started."""

import asyncio
import gc
import logging
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, cast

import pytest
from collector_cases import CollectorRun, runs_of
from waiting import wait_for

from rlightning.environments import Environment, Policy
from rlightning.environments.environment_totals import EnvironmentTotals
from rlightning.environments.policy import GroupRequest
from rlightning.environments.runner import EnvironmentRunner
from rlightning.errors import EngineError, EnvironmentFailedError
from rlightning.rollout import Sampling
from rlightning.rollout.async_metrics import WINDOW_STEPS, BottleneckMonitor
from rlightning.rollout.in_flight import InFlight
from rlightning.types import Outcome, Prompt, Sample, Status, Trajectory


class ImmediateSampler:
    """Answers the prompts that ``answers`` says; the others are held until they are cancelled."""

    tokenizer: Any = None

    def __init__(self, answers: Callable[[int], bool]) -> None:
        self.answers, self.version = answers, 0
        self.num_held = 0
        self.error: EngineError | None = None

    async def sample(self, token_ids: Any, sampling: Sampling, *, num_samples: int = 1, **settings: Any) -> Any:
        if self.error is not None:
            raise self.error
        self.num_held += 1
        try:
            while not self.answers(token_ids[0]):
                await asyncio.sleep(0.01)
        finally:
            self.num_held -= 1
        versions = array("i", [self.version])
        return [Sample(array("q", [1]), array("f", [0.0]), versions, "1", "stop") for _ in range(num_samples)]


class Waits(Environment):
    """Waits until it is cancelled, from when its trajectory has begun."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        self.has_begun.set()
        await asyncio.Event().wait()
        return Outcome()


def test_oldest_trajectory_is_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    environment, sampler = Waits(), cast("Any", ImmediateSampler(lambda _: True))
    runner = EnvironmentRunner(sampler, None, environment, max_length=100, timeout=3600.0)
    seconds = [0.0]
    begun = time.monotonic()
    monkeypatch.setattr("rlightning.environments.runner.monotonic", lambda: begun + seconds[0])
    try:
        future = runner.submit(GroupRequest(Prompt(17, "", [1], {}), Sampling(max_new_tokens=1), 1))
        assert environment.has_begun.wait(60)
        began_within = time.monotonic() - begun
        counts = []
        with caplog.at_level(logging.INFO):
            for later in (0, 59, 60 + began_within, 61 + began_within, 119 + began_within, 121 + began_within):
                seconds[0] = later
                runner.report_oldest()
                counts.append(sum(one.startswith("Waiting for") for one in caplog.messages))
        runner.cancel([future])
        assert counts == [0, 0, 1, 1, 1, 2]
        line = next(one for one in caplog.messages if one.startswith("Waiting for"))
        assert "Waiting for 1 trajectories; trajectory 0 of prompt 17 has run for" in line and "at most 3600 s" in line
    finally:
        runner.close()


class Run(CollectorRun):
    def __init__(
        self, answers: Callable[[int], bool] = lambda index: True, max_staleness: int = 1, **limits: Any
    ) -> None:
        super().__init__(ImmediateSampler(answers), max_staleness=max_staleness, **limits)

    def take(self, num_groups: int, *indices: int, room: int = 100) -> list[int]:
        """Hand in prompts, and take as many groups; the prompts of the groups."""
        requests = [(Prompt(index, str(index), [index], {}), 0) for index in indices]
        return [one.prompt.index for group in self.collect(num_groups, *requests, room=room) for one in group]


@pytest.fixture
def make_run() -> Iterator[Callable[..., Run]]:
    with runs_of(Run) as make:
        yield make


class Outcomes(Environment):
    """Ends each trajectory as its prompt says."""

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        await policy.chat()
        if prompt.text == "failed":
            raise OSError("no sandbox")
        if prompt.text == "timeout":
            return Outcome(status="timeout", error="The agent took more than 60 s.")
        if prompt.text == "waits":
            await asyncio.Event().wait()
        return Outcome(reward=1.0)


LIMITS = {"rollout.trajectory_timeout": 0.01}
ALL_LATE = (
    r"^All 3 trajectories of the step timed out, so that none was sampled\. The first one: It took more than 0\.01 s\. "
    r"Raise rollout\.trajectory_timeout=0\.01, or a limit of the environment's own, if the environment needs longer; "
)
ALL_LOST = (
    r"^2 of the 3 trajectories of the step timed out, so that none was sampled\. 1 failed\. The first one: The agent "
    r"took more than 60 s\. Raise rollout\.trajectory_timeout=0\.01"
)


@pytest.mark.parametrize(
    ("statuses", "settings", "line"),
    [
        (["waits", "waits", "waits"], {"time_limits": LIMITS, "timeout": 0.01}, ALL_LATE),
        (["timeout", "failed", "timeout"], {"time_limits": LIMITS}, ALL_LOST),
        (["timeout", "timeout", "timeout"], {"time_limits": {}}, r"60 s\. Raise the environment's own limit, if"),
        (["timeout", "timeout", "finished"], {"time_limits": LIMITS}, None),
        (["timeout", "timeout", "timeout"], {"time_limits": None}, None),  # they are trained on
        (["timeout", "failed", "timeout"], {"time_limits": LIMITS, "max_failed_share": 1.0}, None),
    ],
)
@pytest.mark.parametrize("method", ["collect", "generate"])
def test_step_without_trajectories_in_time_ends_the_run(
    method: str, statuses: list[str], settings: dict[str, Any], line: str | None
) -> None:
    sampler = ImmediateSampler(lambda _: True)
    requests = [(Prompt(index, text, [index], {}), 0) for index, text in enumerate(statuses)]
    with runs_of(CollectorRun) as make:
        run = make(sampler, Outcomes(), **{"max_failed_share": 0.5, **settings})
        expectation = nullcontext() if line is None else pytest.raises(EnvironmentFailedError, match=line)
        with expectation:
            for _ in range(2):  # each step counts its own
                run.collector.begin_step()
                if method == "collect":
                    run.collect(3, *requests)
                else:
                    run.collector.generate(requests, 1, Sampling(), None)
                run.collector.check_timeouts()
        run.collector.begin_step()
        run.collector.is_training = False
        run.collector.generate(requests, 1, Sampling(), None)
        run.collector.check_timeouts()


@pytest.mark.parametrize("last", ["finished", "timeout"])
def test_refill_may_replace_prompts_that_time_out(last: str) -> None:
    late = [(Prompt(index, "timeout", [index], {}), 0) for index in range(3)]
    with runs_of(CollectorRun) as make:
        run = make(ImmediateSampler(lambda _: True), Outcomes(), max_failed_share=0.5, time_limits=LIMITS)
        run.collector.begin_step()
        run.collect(3, *late)
        run.collect(1, (Prompt(3, last, [3], {}), 0))
        line = r"^All 4 trajectories of the step timed out"
        with nullcontext() if last == "finished" else pytest.raises(EnvironmentFailedError, match=line):
            run.collector.check_timeouts()


@pytest.mark.parametrize("statuses", [("timeout", "failed"), ("failed", "timeout")])
def test_step_of_timeouts_and_failures_has_none_left_in_either_order(statuses: tuple[Status, ...]) -> None:
    totals = EnvironmentTotals(0.1, LIMITS, num_expected=20)
    prompt = Prompt(0, "", [1], {})
    for status in statuses:
        assert totals.describe_timeouts() is None
        totals.count([Trajectory(prompt, (), (), status)] * {"timeout": 18, "failed": 2}[status], None)
    line = totals.describe_timeouts()
    assert line is not None and line.startswith("18 of the 20 trajectories of the step timed out, so that none was sam")


def test_bottleneck_counts_steps_however_often_refilled(make_run: Callable[..., Run]) -> None:
    run, monitor = make_run(), BottleneckMonitor(1, 1, "rollout.num_engines")
    reports = []
    for version in range(WINDOW_STEPS):
        run.sampler.version = version
        for refill in range(4):
            run.take(1, 4 * version + refill)
        reports.append(monitor.add(run.collector.begin_step()))
        assert run.collector.begin_step().staleness == []
    assert not any(reports[:-1])
    assert reports[-1] is not None and reports[-1].startswith("The engines have had nothing to do")


def test_stale_prompts_are_requeued_and_counted(make_run: Callable[..., Run]) -> None:
    run = make_run(lambda index: index != 9)
    num_stale = []
    for version in range(4):
        run.sampler.version = version
        run.take(1, *([version, 9] if version == 0 else [version]))
        num_stale.append(run.collector.begin_step().num_stale)
    assert num_stale == [0, 0, 1, 0]  # started at version 0, and again at 2


def test_surplus_prompts_are_stopped_without_staleness(make_run: Callable[..., Run]) -> None:
    run = make_run(lambda index: index < 2, max_staleness=0)
    assert run.take(2, 0, 1, 2, 3) == [0, 1]
    assert run.collector.totals.num_stopped == 2
    assert [group.prompt.index for group in run.collector.in_flight.waiting] == [2, 3]
    run.sampler.answers = lambda index: True
    assert run.take(2) == [2, 3]
    run.collector.close()
    assert run.sampler.num_held == 0


def test_prompts_without_room_wait(make_run: Callable[..., Run]) -> None:
    run = make_run()
    assert run.take(1, 0, 1, 2, room=2) == [0]
    assert [group.prompt.index for group in run.collector.in_flight.waiting] == [2]


class HeldScores:
    """Scores a prompt's trajectories once ``is_free`` returns true for the prompt's index."""

    def __init__(self) -> None:
        self.is_free: Callable[[int], bool] = lambda index: index == 0
        self.asked: list[int] = []

    async def score(self, trajectories: Sequence[Trajectory]) -> None:
        index = trajectories[0].prompt.index
        self.asked.append(index)
        while not self.is_free(index):
            await asyncio.sleep(0.01)
        for one in trajectories:
            one.reward_results["score"] = float(index), None


def test_groups_are_finished_once_they_are_scored(make_run: Callable[..., Run]) -> None:
    held = HeldScores()
    run = make_run(score=held.score)
    assert run.take(1, 0, 1) == [0]
    wait_for(lambda: held.asked == [0, 1])
    flight = run.collector.in_flight
    assert [group.prompt.index for group in flight.running] == [1]
    held.is_free = lambda index: index != 1
    assert run.take(1, 2) == [2]
    assert (run.collector.totals.num_running, run.collector.totals.num_scoring) == (1, 1)
    held.is_free = lambda index: True
    ((one,),) = run.collect(1)
    assert one.prompt.index == 1 and one.reward_results == {"score": (1.0, None)}
    run.collector.generate([(Prompt(5, "", [5], {}), 0)], 1, Sampling(), None)
    assert held.asked == [0, 1, 2]  # others are scored by the ranks that get them


def test_checkpoints_keep_trajectories_that_are_being_scored(make_run: Callable[..., Run]) -> None:
    held = HeldScores()
    run = make_run(score=held.score)
    assert run.take(1, 0, 1) == [0]
    wait_for(lambda: held.asked == [0, 1])
    run.collector.save_progress()
    resumed = InFlight(1)
    resumed.load_state_dict(run.collector.in_flight.state_dict())
    assert (len(resumed), resumed.num_finished) == (1, 1)


def test_interrupted_step_keeps_trajectories_being_scored(make_run: Callable[..., Run]) -> None:
    held = HeldScores()
    run = make_run(score=held.score)
    assert run.take(1, 0, 1) == [0]
    wait_for(lambda: held.asked == [0, 1])
    run.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run.take(1)
    flight = run.collector.in_flight
    assert (flight.num_finished, flight.running) == (1, [])
    run.error = None
    ((one,),) = run.collect(1)
    assert one.prompt.index == 1 and one.reward_results == {}


def test_generate_keeps_order_and_leaves_flight_alone(make_run: Callable[..., Run]) -> None:
    run = make_run(lambda index: index != 9)
    run.take(1, 0, 9)
    completed: list[int] = []
    groups = run.collector.generate(
        [(Prompt(index, "", [index], {}), 0) for index in (5, 3, 4)],
        2,
        Sampling(),
        lambda prompt, trajectories: completed.append(prompt.index),
    )
    assert [[one.prompt.index for one in group] for group in groups] == [[5, 5], [3, 3], [4, 4]]
    assert sorted(completed) == [3, 4, 5]
    assert [group.prompt.index for group in run.collector.in_flight.running] == [9]


@pytest.fixture
def gc_threshold() -> Iterator[None]:
    usual = gc.get_threshold()
    yield
    gc.set_threshold(*usual)


@pytest.mark.parametrize(("usual", "expected"), [(700, 10_000), (0, 0), (50_000, 50_000)])
def test_garbage_is_collected_rarely_while_groups_are_collected(
    usual: int, expected: int, make_run: Callable[..., Run], gc_threshold: None
) -> None:
    gc.set_threshold(usual, 9, 8)
    seen: list[int] = []

    def answers(index: int) -> bool:
        seen.append(gc.get_threshold()[0])
        return True

    run = make_run(answers)
    run.take(1, 0)
    run.collector.generate([(Prompt(1, "1", [1], {}), 0)], 1, Sampling(), None)
    assert seen == [expected] * 2 and gc.get_threshold() == (usual, 9, 8)
    run.sampler.error = EngineError("No engine is left.")
    with pytest.raises(EngineError):
        run.take(1, 2)
    assert gc.get_threshold() == (usual, 9, 8)


def test_weights_are_synced_while_requests_wait(make_run: Callable[..., Run]) -> None:
    run: Run = make_run()
    run.sampler.answers = lambda index: run.num_syncs == 3
    run.num_needed = 3
    assert run.take(1, 0) == [0]
    assert run.num_syncs == 3


def test_sampler_error_reaches_the_trainer(make_run: Callable[..., Run], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    run = make_run()
    run.sampler.error = EngineError("No engine is left of 2.")
    with pytest.raises(EngineError, match="No engine is left of 2"):
        run.take(1, 0)
    assert caplog.text == "", "it is no failure of the trajectory"


def test_cancelled_requests_are_gone_when_cancel_returns(make_run: Callable[..., Run]) -> None:
    run = make_run(lambda index: index < 2, max_staleness=0)
    run.take(1, 0, *range(10, 42))
    assert run.sampler.num_held == 0, "an engine may sleep now"


def test_close_twice_or_failing_ends_the_runner(make_run: Callable[..., Run]) -> None:
    run = make_run(lambda index: index != 9)
    run.take(1, 0, 9)
    run.collector.close()
    run.collector.close()
    other = make_run(lambda index: index != 9)
    other.take(1, 0, 9)

    def fail() -> None:
        raise OSError("no memory")

    other.collector.save_progress = fail  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no memory"):
        other.collector.close()
    del other.collector.save_progress
    assert other.sampler.num_held == 0
    other.collector.close()
