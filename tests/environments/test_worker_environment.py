"""Environments in real worker processes: what crosses, and what a crash, a hang or a cancellation costs."""

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attempts import CannedSampler, make_group, run_group
from waiting import put_clock_forward, still_running, wait_for
from worker_attempts import Replies, attempt, make, make_prompt, run

from rlightning.environments import LimitReachedError, Policy, clock
from rlightning.environments.recorded_group import RecordedGroup
from rlightning.errors import ConfigError, EngineError, EnvironmentFailedError
from rlightning.rpc import worker_pool
from rlightning.rpc.pooled_worker import PooledWorker
from rlightning.rpc.worker_limits import resident_bytes
from rlightning.types import AgentTrace, Outcome, Prompt, Sample, Trajectory

pytestmark = pytest.mark.processes

HANG_TIMEOUT = 5.0


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_prompt_and_outcome_cross_unchanged(tmp_path: Path) -> None:
    columns = {"answer": "4", "levels": [1, 2.5, None, True], "nested": {"a": {"b": "\ud800"}}}

    async def work() -> None:
        environment = make(tmp_path)
        outcome = await environment.run(make_prompt("answer", **columns), Replies())
        assert outcome.reward == Sample([], [-0.1], [], "", "stop").logprobs[0] and outcome.turn_rewards == [1.0]
        assert outcome.traces == [AgentTrace("me", 0.5, [0])]
        assert outcome.metrics["received"] == zlib.crc32(f"seven {columns}".encode(errors="surrogatepass"))
        with pytest.raises(ConfigError, match=r"^Prompt 3 cannot be sent to a worker of worker_cases\.Deeds: "):
            await environment.run(make_prompt("answer", odd={1, 2}), Replies())
        held = asyncio.ensure_future(environment.run(make_prompt("hold"), Replies()))
        await until(lambda: list(tmp_path.glob("hold *")))
        await environment.close()
        assert len(list(tmp_path.glob("closed *"))) == 1
        assert (await held).status == "aborted"
        assert (await environment.run(make_prompt("answer"), Replies())).status == "finished"
        await environment.close()

    run(work())


# What goes wrong


def test_failures_are_their_workers_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One worker, which is replaced again and again; what it had fails, what waits does not."""

    async def work() -> None:
        environment = make(tmp_path, max_trajectories=2)
        [first] = await attempt(environment, "answer")
        pid = first.metrics["pid"]
        for deed, error in (
            ("raise", "ConnectionError: the sandbox is gone"),
            ("sys.exit", "RuntimeError: the environment raised SystemExit: 4"),
            ("forget", "TypeError: Deeds.run() returned NoneType, and has to return an Outcome: Outcome(reward=1.0)."),
        ):
            failed, other = await attempt(environment, deed, "slow")
            assert failed.status == "failed" and failed.error is not None
            assert failed.error.startswith("Traceback") and failed.error.rstrip().endswith(error)
            assert other.status == "finished" and other.metrics["pid"] == pid
        for deed, error in (
            ("exit", r"^its worker process ended \(exit code 3\)$"),
            ("segfault", r"(?s)line \d+ in run\n.*its worker process ended \(SIGSEGV\)$"),
            ("block", r"(?s)line \d+ in run\n.*its worker process did not respond for 5 s$"),
        ):
            # A large process that crashes may take seconds to be gone.
            environment.hang_timeout = HANG_TIMEOUT if deed == "block" else 60.0
            failed, beside, waiting = await attempt(environment, deed, "hold", "slow")
            assert failed.status == beside.status == "failed"
            assert re.search(error, failed.error or ""), failed.error
            assert waiting.status == "finished" and waiting.metrics["pid"] != pid
            pid = waiting.metrics["pid"]
        environment.hang_timeout = 60.0
        held = asyncio.ensure_future(attempt(environment, "hold"))
        await until(lambda: list(tmp_path.glob(f"hold {int(pid)}")))
        os.kill(int(pid), signal.SIGKILL)
        assert (await held)[0].error == "its worker process ended (SIGKILL)"
        await environment.close()

    with caplog.at_level(logging.WARNING, "rlightning"):
        run(work())
    line = "A trajectory of prompt 3 failed and counts as not sampled: ConnectionError: the sandbox is gone"
    assert line in [record.getMessage() for record in caplog.records]


def test_worker_above_a_limit_is_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def work() -> None:
        unlimited = make(tmp_path, max_output_mb=None)
        [first] = await attempt(unlimited, "answer")
        # A fork has the memory of the process that it is of.
        limit = resident_bytes(int(first.metrics["pid"])) // 1_000_000 + 200
        await unlimited.close()
        environment = make(tmp_path, max_memory_mb=limit, max_output_mb=1)
        [first] = await attempt(environment, "print")
        for deed, reason in (
            ("take memory", rf"ended \(it had [\d,]+ MB in memory, and max_memory_mb={limit}\)$"),
            ("flood", r"ended \(it wrote more than max_output_mb=1 to its output in 60 s\)$"),
            ("flood and block", r"(?s)line \d+ in run\n.*ended \(it wrote more than max_output_mb=1 to its output"),
        ):
            failed, beside = await attempt(environment, deed, "hold")
            assert (failed.status, beside.status) == ("failed", "failed")
            assert re.search(reason, failed.error or ""), failed.error
        [last] = await attempt(environment, "answer")
        assert last.status == "finished" and last.metrics["pid"] != first.metrics["pid"]
        await environment.close()

    run(work())
    written = capfd.readouterr().err
    assert "a line of the environment's\n" in written and len(written) < 3_000_000
    for key in ("max_memory_mb", "max_output_mb"):
        with pytest.raises(ConfigError, match=rf"environment\.{key}=0 must be above 0"):
            make(tmp_path, **{key: 0})


def test_limits_cross_as_themselves(tmp_path: Path) -> None:
    async def work() -> None:
        environment = make(tmp_path)
        limit = LimitReachedError("9 tokens leave no room")
        for deed, message in (("until the limit", str(limit)), ("no room", "no turn is left")):
            with pytest.raises(LimitReachedError, match=f"^{message}$"):
                await environment.run(make_prompt(deed), Replies(error=limit))
        caught = await environment.run(make_prompt("catch the limit"), Replies(error=limit))
        assert (caught.status, caught.error) == ("truncated", str(limit))
        assert (await environment.run(make_prompt("ask too much"), Replies())).error == str(limit)
        with pytest.raises(EngineError, match=r"^the engine is gone$"):
            await environment.run(make_prompt("until the limit"), Replies(error=EngineError("the engine is gone")))
        await environment.close()

    run(work())


@pytest.mark.parametrize("deed", ["hold", "ask forever"])
def test_cancelled_trajectory_ends_in_its_worker(tmp_path: Path, deed: str) -> None:
    async def work() -> None:
        environment, policy = make(tmp_path), Replies()
        trajectory = asyncio.ensure_future(environment.run(make_prompt(deed), policy))
        await until(lambda: list(tmp_path.glob(f"{deed} *")))
        await until(lambda: policy.num_sampled == (2 if deed == "ask forever" else 1))
        trajectory.cancel()
        await asyncio.wait([trajectory])
        await environment.close()
        assert trajectory.cancelled() and (tmp_path / f"cleaned up {deed}").exists()
        assert policy.num_cancelled == (deed == "ask forever")

    run(work())


def test_more_trajectories_than_places_wait_without_timing_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four at a time; 100 s go by at the end of each, which may take 1000 s, and the last ones wait for 1600 s."""

    async def work() -> None:
        environment = make(tmp_path, num_workers=2, max_trajectories=2)
        await environment.check()
        run_one = environment.run

        async def run_and_advance(prompt: Prompt, policy: Policy) -> Outcome:
            outcome = await run_one(prompt, policy)
            put_clock_forward(asyncio.get_running_loop(), 100.0)
            return outcome

        monkeypatch.setattr(environment, "run", run_and_advance)
        prompt = make_prompt("meet")
        found = await run_group(environment, make_group(CannedSampler(), prompt, 20, timeout=1000.0), prompt)
        assert [one.status for one in found] == ["finished"] * 20
        assert len({one.metrics["pid"] for one in found}) == 2
        assert max(one.metrics["num_running"] for one in found) == 2
        await environment.close()

    asyncio.run(work())


def test_workers_ending_in_a_row_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "MAX_UNEXPLAINED_DEATHS", 2)

    async def work() -> None:
        environment = make(tmp_path)
        assert (await attempt(environment, "exit"))[0].status == "failed"
        with pytest.raises(EnvironmentFailedError, match=r"ended 2 times in a row.* one ended \(exit code 3\)"):
            await attempt(environment, "exit")
        await environment.close()

    run(work())


def test_lost_trajectories_are_made_again_within_a_budget(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What ended its worker pays for it, what was beside it does not."""

    async def work() -> None:
        environment, sampler = make(tmp_path, max_trajectories=2), CannedSampler()

        async def attempt(deed: str, max_requeues: int) -> tuple[Trajectory, RecordedGroup]:
            prompt = make_prompt(deed)
            group = make_group(sampler, prompt, timeout=None, max_requeues=max_requeues)
            (trajectory,) = await run_group(environment, group, prompt)
            return trajectory, group

        (ended, group), (beside, other) = await asyncio.gather(attempt("exit once", 1), attempt("hold once", 0))
        assert (ended.status, group.num_requeues) == (beside.status, other.num_requeues) == ("finished", 1)
        assert len(ended.samples) == len(ended.branches) == 1, "the first attempt is forgotten"
        assert len(sampler.seeds) == 4 and len(set(sampler.seeds)) == 2, "each attempt draws other numbers"

        failed, group = await attempt("exit", 2)
        assert (failed.status, group.num_requeues) == ("failed", 2)
        assert len(list(tmp_path.glob("exit [0-9]*"))) == 3
        assert group.first_failure == ("its worker process ended (exit code 3)",) * 2
        await environment.close()

    with caplog.at_level(logging.WARNING, "rlightning"):
        run(work())
    messages = [record.getMessage() for record in caplog.records]
    assert "A trajectory of prompt 3 is requeued: its worker process ended (exit code 3)" in messages


def test_wait_for_a_new_worker_takes_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clocks are put forward by more than a trajectory may take whenever a worker starts."""
    (tmp_path / "hold once 0").touch()
    start, num_started = PooledWorker.start, 0

    def late_time() -> float:
        return time.monotonic() + num_started * 3000.0

    async def start_late(worker: Any, *arguments: Any) -> Any:
        nonlocal num_started
        num_started += 1
        monkeypatch.setattr(asyncio.get_running_loop(), "time", late_time)
        for _ in range(3):
            await asyncio.sleep(0)  # in which deadlines take effect
        return await start(worker, *arguments)

    async def work() -> None:
        environment, prompt = make(tmp_path), make_prompt("exit once")
        limits: dict[str, Any] = {"timeout": 1000.0, "turn_timeout": 1000.0, "max_requeues": 1}
        (one,) = await run_group(environment, make_group(CannedSampler(), prompt, **limits), prompt)
        assert (one.status, one.error, num_started) == ("finished", None, 2)
        assert 0 < one.timings["environment"] <= one.timings["trajectory"] < 1000
        await environment.close()

    monkeypatch.setattr(clock, "monotonic", late_time)
    monkeypatch.setattr(PooledWorker, "start", start_late)
    asyncio.run(work())


def test_killed_trainer_leaves_no_worker(tmp_path: Path) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from worker_attempts import Replies, make, make_prompt\n"
        "async def main():\n"
        "    environment = make(Path(sys.argv[1]), num_workers=2)\n"
        "    runs = [environment.run(make_prompt(deed), Replies()) for deed in ('hold', 'block')]\n"
        "    runs.append(environment.run(make_prompt('hold'), Replies()))\n"
        "    await asyncio.gather(*runs)\n"
        "asyncio.run(main())\n"
    )
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, script, tmp_path], env=paths) as trainer:
        wait_for(lambda: len(list(tmp_path.glob("hold *"))) == 2 or trainer.poll() is not None)
        pids = [int(path.name.split()[1]) for path in tmp_path.glob("hold *")]
        trainer.kill()
    assert len(pids) == 2 and still_running(pids) == []
