"""Agents in worker processes: the same trajectories as in the trainer's, and what a crash or a cancellation costs."""

import asyncio
import logging
import os
from array import array
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from attempts import LATE, make_group, run_group, run_late, say

from rlightning.environments import AgentProgram
from rlightning.environments.agent_function import AgentFunction
from rlightning.environments.agent_workers import start_workers
from rlightning.errors import ConfigError, EngineError
from rlightning.types import AgentTrace, Prompt, Trajectory

pytestmark = pytest.mark.processes

DO = "worker_agents.do"


class Agents:
    """Agents on one event loop, whose workers live for several tests."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runner = folder, asyncio.Runner()
        arguments = {"folder": str(folder)}
        self.there = AgentProgram(DO, arguments, num_workers=1, timeout=2 * LATE)
        self.here = AgentProgram(DO, arguments, num_workers=0)

    def attempt(
        self,
        environment: AgentProgram,
        deed: str,
        *,
        number: int = 1,
        error: Exception | None = None,
        columns: Mapping[str, Any] | None = None,
        is_due: Callable[[], bool] | None = None,
        **settings: Any,
    ) -> list[Trajectory]:
        prompt = Prompt(3, "hi", [1, 2], {"prompt": deed, **(columns or {})})
        group = make_group(say(*["One."] * 20, error=error), prompt, number, **settings)
        making = run_group(environment, group, prompt)
        return self.runner.run(making if is_due is None else run_late(making, is_due))


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory, starts_processes: None) -> Iterator[Agents]:
    made = Agents(tmp_path_factory.mktemp("agents"))
    yield made
    for environment in (made.there, made.here):
        made.runner.run(environment.close())
    made.runner.close()


def test_trajectories_are_those_of_the_trainers_process(agents: Agents) -> None:
    here, there = (agents.attempt(one, "traces", number=2) for one in (agents.here, agents.there))
    for one, other in zip(here, there, strict=True):
        assert (one.status, one.reward, one.error) == (other.status, other.reward, other.error)
        assert (one.status, one.reward) == ("finished", 0.75)
        assert one.traces == other.traces == [AgentTrace("a", 1.0, [0]), AgentTrace("b", 0.5, [1])]
        assert one.branches == other.branches and one.turns == other.turns
        assert [branch.reason for branch in other.branches] == ["start", "started_over"]
        assert one.metrics.pop("pid") == os.getpid() != other.metrics.pop("pid")
        assert one.metrics == other.metrics


@pytest.mark.parametrize(
    ("deed", "status", "reason"),
    [
        ("raise", "failed", "KeyError: 'no such thing'"),
        ("exit", "failed", "the environment raised SystemExit: 3"),
        ("format", "failed", "response_format other than text is not supported by default"),
        ("grow", "truncated", "The agent ended there: HTTPStatusError"),
    ],
)
def test_what_fails_is_never_a_reward(agents: Agents, deed: str, status: str, reason: str) -> None:
    for environment in (agents.here, agents.there):
        (one,) = agents.attempt(environment, deed)
        assert (one.status, one.reward, one.num_sampled > 0) == (status, None, True)
        assert reason in str(one.error)


def test_a_dead_engine_ends_the_run(agents: Agents) -> None:
    with pytest.raises(EngineError, match="gone"):
        agents.attempt(agents.there, "ask", error=EngineError("The engine is gone."), number=3)


@pytest.mark.parametrize(("max_requeues", "status"), [(0, "failed"), (1, "finished")])
def test_a_dead_worker_costs_its_trajectories_at_most(agents: Agents, max_requeues: int, status: str) -> None:
    (agents.folder / "crashed").unlink(missing_ok=True)
    (one,) = agents.attempt(agents.there, "crash", max_requeues=max_requeues)
    assert (one.status, one.reward) == (status, None if status == "failed" else 0.5)
    assert (one.error is None) == (status == "finished") or "SIGKILL" in str(one.error)


def test_the_end_of_its_time_cancels_an_agent(agents: Agents) -> None:
    (one,) = agents.attempt(agents.there, "wait", timeout=LATE, is_due=(agents.folder / "waits").exists)
    assert (one.status, one.reward, one.num_sampled > 0) == ("timeout", None, True)
    agents.attempt(agents.there, "ask")  # the worker goes on, and has cancelled the other before
    assert (agents.folder / "cancelled").read_text() == "One."


def test_functions_without_a_loop_run_there_too(agents: Agents) -> None:
    environment = AgentProgram("worker_agents.in_a_thread", num_workers=1)
    (one,) = agents.attempt(environment, "Hello.")
    with pytest.raises(ConfigError, match="Prompt 3 begins with a special token"):  # as in the trainer's process
        agents.attempt(environment, "<|im_start|>user")
    agents.runner.run(environment.close())
    assert (one.status, one.reward, one.error) == ("finished", 1.0, None)


def test_unsendable_prompts_stay_in_the_trainers_process(
    agents: Agents, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    by_default = AgentProgram(DO, {"folder": str(agents.folder)})
    with caplog.at_level(logging.INFO, "rlightning"):
        for _ in range(2):
            (one,) = agents.attempt(by_default, "ask", columns={"day": date(2026, 1, 1)})
            assert (one.reward, one.metrics["pid"]) == (0.5, os.getpid())
    agents.runner.run(by_default.close())
    (line,) = [one.getMessage() for one in caplog.records if "cannot be sent" in one.getMessage()]
    assert line.startswith(f"AgentProgram: agent={DO} runs in the trainer's process for prompts that cannot be sent")


def test_unsendable_prompts_of_required_workers_are_refused(agents: Agents) -> None:
    for column in (date(2026, 1, 1), array("f", [1.0])):
        with pytest.raises(ConfigError, match="prompt 3 cannot be sent to workers: Its column 'day'") as caught:
            agents.attempt(agents.there, "ask", columns={"day": column})
        assert "\n" not in caught.value.line


async def own(client: Any) -> float:
    """An object."""
    return 1.0


@pytest.mark.parametrize(
    ("agent", "arguments", "reason"),
    [
        (own, {}, "it is no dotted path"),
        (lambda client: 1.0, {}, "it is no dotted path"),
        ("__main__.own", {}, "workers do not run the script"),
        (DO, {"folder": Path("x")}, "its arguments cannot be sent"),
        (DO, {"folder": array("f", [1.0])}, "its arguments hold arrays"),
    ],
)
def test_unsendable_agents_run_in_the_trainers_process(
    agent: Any,
    arguments: dict[str, Any],
    reason: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    with caplog.at_level(logging.INFO, "rlightning"):
        assert start_workers(AgentFunction(agent, arguments), None, 8, {}) is None
    asked: list[tuple[int | None, dict[str, Any]]] = [(2, {}), (None, {"max_memory_mb": 100})]
    for num_workers, settings in asked:
        with pytest.raises(ConfigError, match=f"cannot run in workers: {reason}"):
            start_workers(AgentFunction(agent, arguments), num_workers, 8, settings)
    assert f"runs in the trainer's process, not in workers: {reason}" in caplog.text


def test_there_are_workers_where_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_cores, num_workers in ((2, 0), (4, 3), (64, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=num_cores: set(range(cores)), raising=False)
        workers = start_workers(AgentFunction(DO), None, 8, {})
        assert (0 if workers is None else workers.num_workers) == num_workers
    monkeypatch.undo()
    workers = start_workers(AgentFunction(DO), 2, 8, {})
    assert workers is not None and workers.hang_timeout == 600.0
    workers = start_workers(AgentFunction(DO), 2, 8, {"hang_timeout": 5.0})
    assert workers is not None and (workers.num_workers, workers.hang_timeout) == (2, 5.0)


def test_a_workers_mistake_is_one_line(agents: Agents) -> None:
    reason = r"^AgentProgram: agent=worker_agents\.nothing: 'worker_agents' has no class or"
    with pytest.raises(ConfigError, match=reason) as caught:
        agents.runner.run(AgentProgram("worker_agents.nothing", num_workers=1).check())
    assert "\n" not in caught.value.line
