"""Environments in real worker processes: what crosses, and what a crash, a hang or a cancellation costs."""

import asyncio
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest
import yaml
from attempts import CannedPolicy, CannedSampler, make_group, run_group
from pages import DOCS, find_snippets
from waiting import put_clock_forward, still_running, wait_for

from rlightning.environments import (
    AskLimitError,
    LimitReachedError,
    Message,
    Policy,
    Reply,
    WorkerEnvironment,
    clock,
)
from rlightning.environments.environment import TrajectoryLostError
from rlightning.environments.messages import AssistantMessage, ToolCall
from rlightning.environments.recorded_group import RecordedGroup
from rlightning.errors import ConfigError, EngineError, EnvironmentFailedError
from rlightning.rpc import worker_pool
from rlightning.rpc.pooled_worker import PooledWorker
from rlightning.rpc.worker_limits import resident_bytes
from rlightning.types import AgentTrace, Outcome, Prompt, Sample, Trajectory

pytestmark = pytest.mark.processes

DEEDS = "worker_cases.Deeds"
HANG_TIMEOUT = 5.0


def make_prompt(text: str, **columns: Any) -> Prompt:
    return Prompt(3, text, [1, 2], columns)


def make(folder: Path, **arguments: Any) -> WorkerEnvironment:
    return WorkerEnvironment(DEEDS, {"folder": str(folder)}, **arguments)


class Replies(CannedPolicy):
    """Answers at once with one token, the first time; then it fails, or never answers.

    Attributes:
        num_cancelled: requests.
    """

    def __init__(self, text: str = "seven", error: Exception | None = None) -> None:
        super().__init__(text)
        self.error, self.num_sampled, self.num_cancelled = error, 0, 0

    async def ask(self, *messages: Message, temperature: float = 0.0, max_new_tokens: int | None = None) -> Reply:
        raise AskLimitError("9 tokens leave no room")

    async def sample(self, token_ids: Sequence[int]) -> Sample:
        self.num_sampled += 1
        if self.num_sampled > 1 and self.error is None:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                self.num_cancelled += 1
                await asyncio.sleep(0.2)  # a second cancellation would show
                raise
        if self.num_sampled > 1 and self.error is not None:
            raise self.error
        return await super().sample(token_ids)


class Calls(CannedPolicy):
    """Calls a tool, and says what it got."""

    async def chat(self, *observations: Message, tools: Sequence[Message] | None = None) -> Reply:
        reply = await super().chat(*observations, tools=tools)
        calls = () if len(self.heard) > 1 else (ToolCall("1", "add", '{"a": 1, "b": 2}'),)
        if not calls:
            assert [one["content"] for one in observations] == ["3"]
        return Reply(reply, AssistantMessage("", None, calls))


async def attempt(environment: WorkerEnvironment, *deeds: str) -> list[Outcome]:
    async def run_one(deed: str) -> Outcome:
        try:
            return await environment.run(make_prompt(deed), Replies())
        except TrajectoryLostError as error:
            return Outcome(status="failed", error=error.details)

    return await asyncio.gather(*map(run_one, deeds))


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 300))


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
        "from test_worker_environment import Replies, make, make_prompt\n"
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


# Interpreters, and what cannot start


def make_python(python: str, folder: Path) -> str:
    """An interpreter with msgpack, and nothing else; without its extension if it is another version."""
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
    (site_packages,) = (folder / "lib").glob("python*/site-packages")
    (site_packages / "msgpack").symlink_to(Path(msgpack.__file__).parent)
    return str(folder / "bin" / "python")


@pytest.fixture(scope="module")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_python(sys.executable, tmp_path_factory.mktemp("other"))


def find_python(version: str) -> str | None:
    """The interpreter of a version in PATH, or among pyenv's, whose shims in PATH may not run; None without one."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    folders = [one for one in os.environ["PATH"].split(os.pathsep) if Path(one).name != "shims"]
    folders += [str(one) for one in sorted(pyenv.glob(f"versions/{version}.*/bin"))]
    return shutil.which(f"python{version}", path=os.pathsep.join(folders))


VERSIONS = [one for one in (f"3.{minor}" for minor in range(10, 15)) if one != "{}.{}".format(*sys.version_info)]
FIRST_VERSION = next(filter(find_python, VERSIONS), None)
"""The oldest that there is, whose test is not slow."""


@pytest.mark.parametrize(
    "version", [pytest.param(one, marks=[pytest.mark.slow] if one != FIRST_VERSION else []) for one in VERSIONS]
)
def test_worker_runs_in_each_version_of_python(version: str, tmp_path: Path) -> None:
    """It gets the numbers that it sends and receives, its errors, and the tools of a trajectory."""
    found = find_python(version)
    if found is None:
        pytest.skip(f"there is no python{version} in PATH")
    python = make_python(found, tmp_path / "other")

    async def work() -> None:
        environment = make(tmp_path, python=python)
        await environment.check()
        [answered, failed] = await attempt(environment, "answer", "raise")
        assert (answered.status, answered.metrics["heavy"]) == ("finished", 0)
        assert answered.metrics["version"] == int(version.partition(".")[2])
        assert answered.reward == Sample([], [-0.1], [], "", "stop").logprobs[0]
        assert str(failed.error).rstrip().endswith("ConnectionError: the sandbox is gone")
        await environment.close()
        tools = {"tools": ["tool_cases.add", "tool_cases.greet"]}
        environment = WorkerEnvironment("rlightning.environments.Tools", tools, python=python)
        outcome = await environment.run(make_prompt("hi"), Calls())
        assert (outcome.status, outcome.metrics) == (
            "finished",
            {"turns": 2.0, "tool_calls": 1.0, "tool_failures": 0.0},
        )
        await environment.close()

    run(work())


def test_other_interpreter_needs_msgpack_alone(tmp_path: Path, other_python: str) -> None:
    async def work() -> None:
        environment = make(tmp_path, python=other_python)
        await environment.check()
        outcome = await environment.run(make_prompt("answer"), Replies())
        assert (outcome.status, outcome.metrics["heavy"]) == ("finished", 0)
        await environment.close()

    run(work())


def test_section_of_the_page_runs(tmp_path: Path, other_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (DOCS / "environments.md").read_text(encoding="utf-8")
    (tmp_path / "guess_number.py").write_text(find_snippets(page)[0])
    section = next(text for text in find_snippets(page, "yaml") if "WorkerEnvironment" in text)
    (tmp_path / "agents").symlink_to(Path(other_python).parents[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    async def work() -> None:
        environment = WorkerEnvironment(**yaml.safe_load(section)["environment"]["init_args"])
        await environment.check()
        outcome = await environment.run(make_prompt("1+1=", answer="7"), Replies("7"))
        assert (outcome.reward, outcome.metrics) == (1.0, {"turns": 1})
        await environment.close()

    run(work())


@pytest.mark.parametrize(
    ("environment", "arguments", "line"),
    [
        ("Deeds", {}, r"^environment\.environment=Deeds is no dotted path\. Write module\.name, such as my_package"),
        ("no_package.Deeds", {}, r"=no_package\.Deeds cannot be imported by .*/python: ModuleNotFoundError: No module"),
        ("worker_cases.Deed", {}, r"Deed: 'worker_cases' has no class or function 'Deed'\. Did you mean 'Deeds'\?"),
        ("worker_cases.Other", {}, r"Other is a class that is no environment\. Name a subclass of rlightning\."),
        ("worker_cases.NeedsRoom", {}, r"cannot be made with no arguments: TypeError: .* argument: 'rooms'\. Change"),
        ("worker_cases.NeedsRoom", {"rooms": 0}, r"with the arguments rooms: OSError: no room is free\. Change"),
    ],
)
def test_environment_that_cannot_be_made_is_one_line(
    other_python: str, environment: str, arguments: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError, match=line) as raised:
        asyncio.run(WorkerEnvironment(environment, arguments, python=other_python).check())
    assert "\n" not in raised.value.line


def test_environment_whose_module_raises_is_one_line(
    other_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_deeds.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    line = r"^environment\.environment=broken_deeds\.Deeds cannot be imported by .*/python: ZeroDivisionError: .*zero "
    with pytest.raises(ConfigError, match=line + rf"\({tmp_path}/broken_deeds\.py, line 1\)\. Fix its module\.\n"):
        asyncio.run(WorkerEnvironment("broken_deeds.Deeds", python=other_python).check())


@pytest.mark.parametrize(
    ("program", "line"),
    [
        (None, "cannot be started: No such file or directory. Give the path"),
        ("echo hello", "is no Python. Give the path"),
        ("echo 3.9", "is Python 3.9; workers need 3.10 or later."),
        ("echo 3.10; exit 1", "has no msgpack, which workers need. Install it: "),
    ],
)
def test_unusable_interpreter_is_one_line(tmp_path: Path, program: str | None, line: str) -> None:
    python = tmp_path / "python"
    if program is not None:
        python.write_text(f"#!/bin/sh\n{program}\n")
        python.chmod(0o755)
    with pytest.raises(ConfigError, match=re.escape(f"environment.python={python} {line}")):
        asyncio.run(make(tmp_path, python=str(python)).check())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"num_workers": 0}, "environment.num_workers=0 must be at least 1."),
        ({"max_trajectories": 0}, "environment.max_trajectories=0 must be at least 1."),
        ({"hang_timeout": 0}, "environment.hang_timeout=0 must be above 0 seconds."),
        (
            {"arguments": {"client": object()}},
            "environment.arguments cannot be sent to a worker: A message holds",
        ),
    ],
)
def test_wrong_argument_is_one_line(arguments: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}"):
        WorkerEnvironment(DEEDS, **arguments)
