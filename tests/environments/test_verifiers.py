"""Task sets of verifiers 0.4, in an interpreter of their own."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from verifiers_cases import attempt, make_interpreter, write_words
from waiting import still_running

from rlightning.environments.verifiers import Verifiers
from rlightning.errors import ConfigError, EngineError

pytestmark = [pytest.mark.slow, pytest.mark.processes]
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo 4$((1+1))"}}\n</tool_call>'


@pytest.fixture(scope="session")
def python() -> str:
    return make_interpreter()


def numbers(python: str, **arguments: Any) -> Verifiers:
    return Verifiers(**{"taskset": "number_tasks", "python": python, "renderer": "qwen3", **arguments})


def said(trajectory: Any) -> list[str]:
    return [turn.sample.text for turn in trajectory.turns if turn.sample is not None]


@pytest.mark.parametrize(
    ("task", "turns", "branches", "reward"),
    [(0, ["It is 7"], ["start"], 2.0), (1, ["6", "8"], ["start"], 0.0), (2, ["6", "5", "7"], ["start", "sampled_again"], 2.0)],
)
def test_each_sampled_token_is_trained_once(
    python: str, tmp_path: Path, task: int, turns: list[str], branches: list[str], reward: float
) -> None:
    (one,) = attempt(numbers(python), tmp_path, *turns, task=task)
    assert (one.status, one.reward, one.error) == ("finished", reward, None)
    assert (said(one), [branch.reason for branch in one.branches]) == (turns, branches)
    assert one.metrics["turns"] == len(turns) and one.metrics["said"] == reward / 2
    assert sum(sum(branch.is_sampled) for branch in one.branches) == one.num_sampled


def test_trajectories_of_a_group_run_at_the_same_time(python: str, tmp_path: Path) -> None:
    trajectories = attempt(numbers(python), tmp_path, *["7"] * 6, num_trajectories=6, delay=1.0)
    assert [(one.status, one.reward, said(one)) for one in trajectories] == [("finished", 2.0, ["7"])] * 6


def test_hangman_is_played_over_several_turns_with_a_tool(python: str, tmp_path: Path) -> None:
    environment = Verifiers(
        {"id": "textarena", "game": "Hangman-v0"},
        python=python,
        renderer="qwen3",
        roles={"player": {"harness": {"id": "bash"}, "max_turns": 4}},
        num_tasks=2,
        variables=write_words(tmp_path / "nltk"),
    )
    (one,) = attempt(environment, tmp_path, CALL, "I guess [e]", "I guess [a]", "I guess [z]", task=1)
    assert (one.status, one.error, len(one.branches)) == ("finished", None, 1)
    assert said(one) == [CALL, "I guess [e]", "I guess [a]", "I guess [z]"] and one.metrics["turns"] == 4
    assert one.reward is not None and one.metrics["game_reward"] == one.reward


def test_a_simulated_user_is_sampled_and_not_trained(python: str, tmp_path: Path) -> None:
    environment = numbers(
        python,
        environment="user-sim",
        roles={"assistant": {"harness": {"id": "null"}}, "user": {"max_turns": 3}},
    )
    (one,) = attempt(environment, tmp_path, "Please say 7.", "It is 7", "###DONE###")
    assert (one.status, one.error) == ("finished", None)
    assert said(one) == ["It is 7"] and one.reward == 2.0 == 2 * one.metrics["assistant/said"]
    assert one.metrics["assistant/user_turns"] == 2


@pytest.mark.parametrize(
    ("agents", "turns", "reward"), [(None, ["7", "5"], 1.0), (["first"], ["7"], 2.0), (["second"], ["5"], 0.0)]
)
def test_agents_that_are_trained(
    python: str, tmp_path: Path, agents: list[str] | None, turns: list[str], reward: float
) -> None:
    (one,) = attempt(numbers(python, environment="two_seats", agents=agents), tmp_path, "7", "5")
    assert (one.status, one.reward, said(one)) == ("finished", reward, turns)
    assert [branch.reason for branch in one.branches] == ["start", "started_over"][: len(turns)]
    assert (one.metrics["first/said"], one.metrics["second/said"]) == (1.0, 0.0)


def test_an_episode_that_broke_or_timed_out_has_no_reward(python: str, tmp_path: Path) -> None:
    (one,) = attempt(numbers(python), tmp_path, "7", task=3)
    assert (one.status, one.reward) == ("failed", None) and "the scorer's service is down" in str(one.error)
    for environment, run_s in ((numbers(python, timeout=3.0), 60.0), (numbers(python), 3.0)):
        (one,) = attempt(environment, tmp_path, "7", task=4, timeout=run_s)
        assert (one.status, one.reward, said(one)) == ("timeout", None, ["7"])
    verifiers_own = numbers(python, roles={"agent": {"timeout": {"rollout": 3.0}}})
    (one,) = attempt(verifiers_own, tmp_path, "7", task=4)
    assert (one.status, one.reward, one.error) == ("timeout", None, "A deadline of verifiers' has passed.")
    (one,) = attempt(numbers(python), tmp_path, task={"answer": "7", "prompt": 5})
    assert (one.status, one.reward) == ("failed", None) and "verifiers refused the task" in str(one.error)


def test_a_history_without_room_truncates(python: str, tmp_path: Path) -> None:
    for max_length in (400, 1000):  # which our endpoint refuses, or renderers
        (one,) = attempt(numbers(python), tmp_path, "7", task=5, max_length=max_length)
        assert (one.status, one.reward, said(one)) == ("truncated", 2.0, ["7"])


def test_a_dead_engine_ends_the_run(python: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="gone"):
        attempt(numbers(python), tmp_path, error=EngineError("The engine is gone."))


@pytest.mark.parametrize(("number", "how"), [(signal.SIGKILL, "ended (SIGKILL)"), (signal.SIGSTOP, "did not respond")])
def test_a_server_that_ends_or_hangs_is_replaced(python: str, tmp_path: Path, number: int, how: str) -> None:
    environment = numbers(python, hang_timeout=4.0)
    pids: list[int] = []

    async def strike(environment: Verifiers) -> None:
        server = environment._get_servers().servers[0]
        while not server.runs:
            await asyncio.sleep(0.05)
        await asyncio.sleep(2.0)
        assert server.pid is not None
        pids.append(server.pid)
        os.kill(server.pid, number)

    (one,) = attempt(environment, tmp_path, "7", task=4, during=strike)
    assert (one.status, one.reward) == ("failed", None) and how in str(one.error)
    assert still_running(pids) == []
    (one,) = attempt(environment, tmp_path, "7", task=0)
    assert (one.status, one.reward) == ("finished", 2.0)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"taskset": "no-such-set"}, r"^Verifiers: ModuleNotFoundError: taskset 'no-such-set' not found"),
        ({"roles": {"player": {}}}, r"player"),
        ({"agents": ["player"]}, r"^Verifiers: the environment has no agent 'player'\. "),
    ],
)
def test_mistakes_are_one_line(python: str, arguments: dict[str, Any], reason: str) -> None:
    environment = numbers(python, **arguments)

    async def check() -> None:
        try:
            await environment.check()
        finally:
            await environment.close()

    with pytest.raises(ConfigError, match=reason) as caught:
        asyncio.run(check())
    assert "\n" not in caught.value.line
