"""Task sets of verifiers 0.4, in an interpreter of their own."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml
from agent_cases import ScriptedSampler
from attempts import LATE, make_group, run_group, say
from chat_templates import make_tokenizer
from engine_run import Witness, make_module, make_trainer
from verifiers_cases import attempt_task, make_interpreter, write_words
from waiting import PATIENCE_SECONDS, put_clock_forward, still_running

from rlightning.callbacks import TransformersRollout, VLLMRollout
from rlightning.data import PromptDataModule
from rlightning.environments import worker_environment
from rlightning.environments.policy import RecordedPolicy
from rlightning.environments.verifiers import Verifiers
from rlightning.environments.verifiers.server import Announcement, ServerEndedError
from rlightning.errors import ConfigError, EngineError
from rlightning.rpc.client import LoopThread
from rlightning.types import Prompt, Trajectory

pytestmark = pytest.mark.processes
PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo 4$((1+1))"}}\n</tool_call>'


@pytest.fixture(scope="session")
def python() -> str:
    return make_interpreter()


class Attempts:
    """Attempts tasks in environments that stay, one for each of the arguments that were given."""

    def __init__(self, python: str) -> None:
        self.python, self.made, self.loop = python, dict[str, Verifiers](), LoopThread("test")

    def environment(self, given: dict[str, Any] | None = None) -> Verifiers:
        arguments: dict[str, Any] = {"taskset": "number_tasks", "python": self.python, "renderer": "qwen3"}
        arguments["hang_timeout"] = PATIENCE_SECONDS
        return self.made.setdefault(str(given), Verifiers(**arguments | (given or {})))

    def __call__(
        self, *texts: str, folder: Path, given: dict[str, Any] | None = None, **arguments: Any
    ) -> list[Trajectory]:
        return attempt_task(self.loop, self.environment(given), folder, *texts, **arguments)


@pytest.fixture(scope="module")
def make(python: str, starts_processes: None) -> Iterator[Attempts]:
    attempts = Attempts(python)

    async def close() -> None:
        await asyncio.gather(*(environment.close() for environment in attempts.made.values()))

    yield attempts
    attempts.loop.run(close())
    attempts.loop.close()


def skip_without_registry(trajectory: Trajectory) -> None:
    """The bash and null harnesses have uv fetch what they run with."""
    if "Failed to fetch" in (trajectory.error or ""):
        pytest.skip("uv reaches no package registry")


def said(trajectory: Any) -> list[str]:
    return [turn.sample.text for turn in trajectory.turns if turn.sample is not None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "turns", "branches", "reward"),
    [
        (0, ["It is 7"], ["start"], 2.0),
        (1, ["6", "8"], ["start"], 0.0),
        (2, ["6", "5", "7"], ["start", "history_edited"], 2.0),
    ],
)
def test_each_sampled_token_is_trained_once(
    make: Attempts, tmp_path: Path, task: int, turns: list[str], branches: list[str], reward: float
) -> None:
    (one,) = make(*turns, folder=tmp_path, task=task)
    assert (one.status, one.reward, one.error) == ("finished", reward, None)
    assert (said(one), [branch.reason for branch in one.branches]) == (turns, branches)
    assert one.metrics["turns"] == len(turns) and one.metrics["said"] == reward / 2
    assert sum(sum(branch.is_sampled) for branch in one.branches) == one.num_sampled


@pytest.mark.slow
def test_trajectories_of_a_group_run_at_once(make: Attempts, tmp_path: Path) -> None:
    trajectories = make(*["7"] * 6, folder=tmp_path, number=6, delay=1.0)
    assert [(one.status, one.reward, said(one)) for one in trajectories] == [("finished", 2.0, ["7"])] * 6


@pytest.mark.slow
def test_hangman_is_played_with_a_tool(make: Attempts, python: str, tmp_path: Path) -> None:
    (snippet,) = re.findall(r"```yaml\n(.*?)```", PAGE.partition("\n## Packages: verifiers\n")[2], re.DOTALL)
    given = yaml.safe_load(snippet)["environment"]["init_args"]
    given |= {"python": python, "num_tasks": 2, "variables": write_words(tmp_path / "nltk")}
    given["roles"]["player"]["max_turns"] = 4
    (one,) = make(CALL, "I guess [e]", "I guess [a]", "I guess [z]", folder=tmp_path, given=given, task=1)
    skip_without_registry(one)
    assert (one.status, one.error, len(one.branches)) == ("finished", None, 1)
    assert said(one) == [CALL, "I guess [e]", "I guess [a]", "I guess [z]"] and one.metrics["turns"] == 4
    assert one.reward is not None and one.metrics["game_reward"] == one.reward
    assert [turn.message["role"] for turn in one.turns] == ["assistant", "tool"] + ["assistant", "user"] * 2 + [
        "assistant"
    ]
    assert "42" in str(one.turns[1].message["content"])


@pytest.mark.slow
def test_a_simulated_user_is_sampled_and_not_trained(make: Attempts, tmp_path: Path) -> None:
    roles = {"assistant": {"harness": {"id": "null"}}, "user": {"max_turns": 3}}
    given = {"environment": "user-sim", "roles": roles}
    (one,) = make("Please say 7.", "It is 7", "###DONE###", folder=tmp_path, given=given)
    skip_without_registry(one)
    assert (one.status, one.error) == ("finished", None)
    assert said(one) == ["It is 7"] and one.reward == 2.0 == 2 * one.metrics["assistant/said"]
    assert one.metrics["assistant/user_turns"] == 2


@pytest.mark.slow
def test_hangman_is_played_with_a_simulated_user(make: Attempts, tmp_path: Path) -> None:
    """Two agents of verifiers' own environment over a real task set: one is trained, the other asks for its moves."""
    given = {
        "taskset": {"id": "textarena", "game": "Hangman-v0"},
        "environment": "user-sim",
        "roles": {"assistant": {"harness": {"id": "null"}}, "user": {"max_turns": 3}},
        "num_tasks": 2,
        "variables": write_words(tmp_path / "nltk"),
    }
    turns = ("Guess a letter.", "I guess [e]", "Another one.", "I guess [a]", "###DONE###")
    (one,) = make(*turns, folder=tmp_path, given=given, task=1)
    skip_without_registry(one)
    assert (one.status, one.error, len(one.branches)) == ("finished", None, 1)
    assert said(one) == ["I guess [e]", "I guess [a]"] and one.metrics["assistant/user_turns"] == 3
    assert sum(one.branches[0].is_sampled) == one.num_sampled == sum(len(s.token_ids) for s in one.samples)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "turns", "reward", "traces"),
    [
        ({}, ["7", "5"], 1.0, [("first", 2.0, [0]), ("second", 0.0, [1])]),
        ({"credit": "episode"}, ["7", "5"], 1.0, None),
        ({"agents": ["first"]}, ["7"], 2.0, [("first", 2.0, [0])]),
        ({"agents": ["second"]}, ["5"], 0.0, [("second", 0.0, [0])]),
    ],
)
def test_agents_that_are_trained(
    make: Attempts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    turns: list[str],
    reward: float,
    traces: Any,
) -> None:
    given = {"environment": "two_seats"}
    for name, value in change.items():
        monkeypatch.setattr(make.environment(given), name, value)
    (one,) = make("7", "5", folder=tmp_path, given=given)
    assert (one.status, one.reward, said(one), one.traces) == ("finished", reward, turns, traces)
    assert [branch.reason for branch in one.branches] == ["start", "started_over"][: len(turns)]
    assert (one.metrics["first/said"], one.metrics["second/said"]) == (1.0, 0.0)


@pytest.mark.slow
def test_an_episode_that_broke_has_no_reward(make: Attempts, tmp_path: Path) -> None:
    (one,) = make("7", folder=tmp_path, task=3)
    assert (one.status, one.reward) == ("failed", None) and "the scorer's service is down" in str(one.error)
    (one,) = make(folder=tmp_path, task={"answer": "7", "prompt": 5})
    assert (one.status, one.reward) == ("failed", None) and "verifiers refused the task" in str(one.error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "settings", "data", "reason"),
    [
        (None, {"timeout": LATE}, {}, "It took more than 1000 s."),
        (LATE, {"timeout": 2 * LATE}, {}, "The episode took more than 1000 s."),
        (None, {}, {"seconds": LATE, "timeout": {"agent": LATE}}, "A deadline of verifiers' has passed."),
    ],
)
def test_an_episode_that_timed_out_has_no_reward(
    make: Attempts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: float | None,
    settings: dict[str, Any],
    data: dict[str, Any],
    reason: str,
) -> None:
    """By the run's deadline, the environment's and verifiers' own, each of which passes after a turn."""
    has_said = tmp_path / "has said"

    async def let_time_go_by(environment: Verifiers, sampler: ScriptedSampler) -> None:
        while not has_said.exists():
            await asyncio.sleep(0.02)
        if "seconds" not in data:  # else on the server's clock
            put_clock_forward(asyncio.get_running_loop(), LATE)

    monkeypatch.setattr(make.environment(), "timeout", own)
    task = {"prompt": "Say 7.", "answer": "7", "what": "slow", "file": str(has_said), **data}
    (one,) = make("7", folder=tmp_path, task=task, during=let_time_go_by, **settings)
    assert (one.status, one.reward, said(one)) == ("timeout", None, ["7"])
    assert reason in str(one.error)


@pytest.mark.slow
@pytest.mark.parametrize("asked_before", [False, True])
def test_a_history_without_room_truncates(make: Attempts, tmp_path: Path, asked_before: bool) -> None:
    if asked_before:  # renderers keeps the limit of its first request, and leaves it to the endpoint to refuse
        make("7", folder=tmp_path)
    (one,) = make("7", folder=tmp_path, task=5, max_length=1000)
    assert (one.status, one.reward, said(one)) == ("truncated", 2.0, ["7"])


@pytest.mark.slow
def test_a_dead_engine_ends_the_run(make: Attempts, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="gone"):
        make(folder=tmp_path, error=EngineError("The engine is gone."))


@pytest.mark.slow
def test_a_server_that_ends_or_hangs_is_replaced(make: Attempts, tmp_path: Path) -> None:
    pids: list[int] = []

    def strike(number: int) -> Callable[[Verifiers, ScriptedSampler], Any]:
        async def during(environment: Verifiers, sampler: ScriptedSampler) -> None:
            server = environment._get_servers().servers[0]
            while not sampler.histories:  # the episode is under way
                await asyncio.sleep(0.02)
            assert server.process is not None
            pids.append(server.process.pid)
            if number == signal.SIGSTOP:
                server.hang_timeout = 1.0
            os.kill(server.process.pid, number)

        return during

    (one,) = make("7", folder=tmp_path, task=4, during=strike(signal.SIGSTOP))
    assert (one.status, one.reward) == ("failed", None) and "did not respond for 1 s" in str(one.error)
    servers = make.environment()._servers
    assert servers is not None
    servers.servers[0].hang_timeout = PATIENCE_SECONDS
    (one,) = make("7", folder=tmp_path, task=4, during=strike(signal.SIGKILL))
    assert (one.status, one.reward) == ("failed", None) and "ended (SIGKILL)" in str(one.error)
    assert len(set(pids)) == 2 and still_running(pids) == []
    (one,) = make("7", folder=tmp_path)
    assert (one.status, one.reward) == ("finished", 2.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"taskset": "no-such-set"}, r"^Verifiers: ModuleNotFoundError: taskset 'no-such-set' not found"),
        ({"roles": {"player": {}}}, r"player"),
    ],
)
def test_mistakes_are_one_line(python: str, arguments: dict[str, Any], reason: str) -> None:
    environment = Verifiers(**{"taskset": "number_tasks", "python": python, **arguments})

    async def check() -> None:
        try:
            await environment.check()
        finally:
            await environment.close()

    with pytest.raises(ConfigError, match=reason) as caught:
        asyncio.run(check())
    assert "\n" not in caught.value.line


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_a_run_trains_what_it_sampled(python: str, tmp_path: Path, engine: str) -> None:
    tokenizer = make_tokenizer("qwen3")
    tokenizer.save_pretrained(tmp_path)
    model = tiny.save_weights(tmp_path, len(tokenizer), 0, max_position_embeddings=512)
    environment = Verifiers("number_tasks", python=python, renderer="qwen3", hang_timeout=PATIENCE_SECONDS)
    witness = Witness()
    rows = [{"prompt": "", "task": number} for number in (1, 2)] * 4
    data = PromptDataModule(rows, max_prompt_tokens=64)
    settings: dict[str, Any] = {"environment": environment, "max_new_tokens": 8, "seed": 0, "verify_trajectories": True}
    if engine == "vllm":
        rollout: Any = VLLMRollout(**settings, engine={"kv_cache_memory_bytes": 1 << 28})
    else:
        rollout = TransformersRollout(**settings)
    make_trainer(tmp_path, 1, rollout, witness).fit(make_module(model), data)
    (batch,), (metrics,) = witness.batches, witness.steps
    assert metrics["policy/rollout_gap_max"] < 1e-4 and metrics["environment/verify_gap"] < 1e-4
    for one in batch.trajectories:
        assert one.status in ("finished", "truncated") and one.reward is not None
        assert len(one.samples) == one.prompt.columns["task"] + 1
    assert batch.completion_lengths.sum().item() == sum(one.num_sampled for one in batch.trajectories)


@pytest.mark.slow
def test_the_server_ends_with_its_trainer(python: str, tmp_path: Path) -> None:
    code = f"""\
import asyncio
from rlightning.environments.verifiers import Verifiers
async def main():
    environment = Verifiers("number_tasks", python={python!r})
    await environment.check()
    print(environment._get_servers().servers[0].process.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    (tmp_path / "trainer.py").write_text(code)
    folders = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(tmp_path / "trainer.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=folders) as trainer:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        trainer.kill()
    assert still_running([pid]) == []


def test_unknown_trained_agent_is_refused() -> None:
    environment = Verifiers("number_tasks", python="python", agents=["player"])
    with pytest.raises(ConfigError, match=r"^Verifiers: the environment has no agent 'player'\. "):
        environment._check_announced(Announcement(roles=["agent"], tasks=[{}], has_uv=True))


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ("3.10", r"is Python 3\.10; workers need 3\.11 or later\. Give a newer one\."),
        ("3.12\n0.3.9", r"has verifiers 0\.3\.9, and this speaks with 0\.4\. Install that: "),
        (None, r"has no verifiers, which workers need\. Install it: .* -m pip install 'verifiers==0\.4\.\*' uv\.$"),
    ],
)
def test_interpreters_that_cannot_be_used(tmp_path: Path, answers: str | None, reason: str) -> None:
    stub = tmp_path / "python"
    stub.write_text(f"#!/bin/sh\necho '{answers}'\n")
    stub.chmod(0o755)
    path = sys.executable if answers is None else str(stub)
    with pytest.raises(ConfigError, match=reason) as caught:
        asyncio.run(Verifiers("number_tasks", python=path).check())
    assert "\n" not in caught.value.line


def test_interpreter_that_hangs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = tmp_path / "python"
    stub.write_text("#!/bin/sh\nexec sleep 600\n")
    stub.chmod(0o755)
    monkeypatch.setattr(worker_environment, "PROBE_TIMEOUT", 0.2)
    with pytest.raises(ConfigError, match=r"cannot be started: it took more than 0\.2 s\. Give the path") as caught:
        asyncio.run(Verifiers("number_tasks", python=str(stub)).check())
    assert "\n" not in caught.value.line


@pytest.mark.parametrize("name", ["num_tasks", "num_workers", "max_trajectories", "timeout", "hang_timeout", "credit"])
def test_arguments_that_cannot_be(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^Verifiers: {name}=0 must be "):
        Verifiers("number_tasks", python="python", **{name: 0})  # type: ignore[arg-type]


def test_episodes_of_a_server_that_ended_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Verifiers("number_tasks", python="python")
    found: list[RecordedPolicy] = []

    async def start(server: Any) -> None:
        """Nothing: no server is needed."""

    async def run_episode(server: Any, key: Any, prompt: Prompt, policy: RecordedPolicy, parts: Any) -> Any:
        found.append(policy)
        raise ServerEndedError("its environment server ended (SIGKILL)", "the log")

    monkeypatch.setattr(environment, "_start", start)
    monkeypatch.setattr(environment, "_run_episode", run_episode)
    prompt = Prompt(0, "", [1], {})
    group = make_group(say(family="qwen3"), prompt, timeout=None, max_requeues=2)

    async def run() -> list[Trajectory]:
        try:
            return await run_group(environment, group, prompt)
        finally:
            await environment.close()

    (one,) = asyncio.run(run())
    assert (one.status, group.num_requeues, len({id(policy) for policy in found})) == ("failed", 2, 3)
    assert str(one.error) == "its environment server ended (SIGKILL)\nthe log"


def test_tasks_are_named_by_number_within_the_list() -> None:
    environment = Verifiers("number_tasks", python="python")
    environment._tasks = [{"idx": 0}, {"idx": 1}]
    assert environment._find_task(Prompt(3, "", [1], {})) == {"idx": 1}
    assert environment._find_task(Prompt(3, "", [1], {"task": 0})) == {"idx": 0}
    for number in (2, -1):
        with pytest.raises(ConfigError, match=f"task={number}, and 2 tasks were listed"):
            environment._find_task(Prompt(3, "", [1], {"task": number}))
