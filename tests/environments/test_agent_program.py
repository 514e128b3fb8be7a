"""Agents as environments: functions and programs that reach the policy through the endpoint."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import my_agents
import openai
import pytest
from attempts import LATE, attempt, say
from waiting import put_clock_forward, still_running, wait_for

from rlightning.environments import AgentProgram, Environment, Policy
from rlightning.environments.agent_command import AgentCommand, _fill
from rlightning.errors import ConfigError, EngineError, RequestRefusedError
from rlightning.types import Outcome, Prompt, Trajectory

AGENT = "my_agents.two_turns"
PROMPT = Prompt(3, "1+1=", [1, 2], {"prompt": "1+1=", "answer": "2"})


def run_agent(
    environment: Environment, *said: str, error: Exception | None = None, number: int = 1, **settings: Any
) -> list[Trajectory]:
    return attempt(environment, say(*said, error=error), PROMPT, number, **settings)


@pytest.mark.long
@pytest.mark.parametrize(
    ("agent", "arguments", "reward", "turns"),
    [
        (my_agents.two_turns, {}, 2 / 8, 2),
        ("my_agents.two_turns", {}, 2 / 8, 2),
        (my_agents.wrapped, {}, 2 / 8, 2),
        (my_agents.by_address, {"bonus": 0.5}, 3.5, 1),
        (my_agents.by_client, {}, None, 1),
    ],
)
def test_functions_say_by_their_parameters_what_they_get(
    agent: Any, arguments: dict[str, Any], reward: float | None, turns: int
) -> None:
    (one,) = run_agent(AgentProgram(agent, arguments), "111", "1 1")
    assert (one.status, one.reward, one.error) == ("finished", reward, None)
    assert (one.metrics["turns"], one.metrics["branches"], len(one.branches)) == (turns, 1, 1)


@pytest.mark.long
@pytest.mark.parametrize("agent", [my_agents.two_turns, my_agents.in_own_loop])
def test_each_trajectory_of_a_group_has_its_session(agent: Any) -> None:
    environment = AgentProgram(agent, max_trajectories=3)
    trajectories = run_agent(environment, *["1"] * 16, number=8)
    assert [(one.status, one.num_sampled, len(one.branches)) for one in trajectories] == [("finished", 4, 1)] * 8


@pytest.mark.long
@pytest.mark.parametrize(
    ("agent", "error", "status", "reason"),
    [
        (my_agents.swallows, RequestRefusedError("ValueError: no"), "failed", "The engine refused a request"),
        (my_agents.idle, None, "failed", "the agent ended without a turn of the policy's"),
        (
            my_agents.no_number,
            None,
            "failed",
            "the agent returned 'good', and has to return a number, None or an Outcome",
        ),
        (my_agents.grows, None, "truncated", "The agent ended there: BadRequestError"),
        (my_agents.crashes_after_its_limit, None, "failed", "ConnectionResetError: the database is gone"),
    ],
)
def test_what_fails_is_never_a_reward(agent: Any, error: Any, status: str, reason: str) -> None:
    environment = AgentProgram(agent)
    if agent is my_agents.idle:
        environment.check = environment.endpoint.start  # type: ignore[method-assign]  # it would be refused
    (one,) = run_agent(environment, *["1"] * 99, error=error)
    assert (one.status, one.reward) == (status, None)
    assert reason in str(one.error)


def test_a_dead_engine_ends_an_agents_run() -> None:
    with pytest.raises(EngineError, match="gone"):
        run_agent(AgentProgram(my_agents.swallows), error=EngineError("The engine is gone."))


def test_full_endpoint_is_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    is_refused = threading.Event()

    async def ask_at_once(base_url: str, api_key: str, messages: Any) -> float:
        """Ask more often than there are connections, and take every error for a wrong answer."""
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            asked = [
                asyncio.ensure_future(client.chat.completions.create(model="any", messages=messages)) for _ in range(5)
            ]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            is_refused.set()
            answers = await asyncio.gather(*asked, return_exceptions=True)
        return 0.0 if any(isinstance(one, Exception) for one in answers) else 1.0

    sampler = say(*["1"] * 5)
    sample = sampler.sample

    async def sample_later(*args: Any, **settings: Any) -> Any:
        """Answer once a request was refused, so that the others are all open by then."""
        while not is_refused.is_set():
            await asyncio.sleep(0.01)
        return await sample(*args, **settings)

    monkeypatch.setattr(sampler, "sample", sample_later)
    environment = AgentProgram(ask_at_once, max_trajectories=1, endpoint={"max_connections": 3})
    (one,) = attempt(environment, sampler, PROMPT, 1)
    assert (one.status, one.reward) == ("failed", None)
    assert "EndpointFullError: The endpoint has environment.endpoint.max_connections=3 requests" in str(one.error)


class Swallows(Environment):
    """Takes every error for a wrong answer; a sibling of the first waits."""

    def __init__(self) -> None:
        self.num_begun = self.num_cancelled = 0

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        self.num_begun += 1
        try:
            if self.num_begun > 1:
                await asyncio.Event().wait()
            await policy.chat({"role": "user", "content": "hi"}, tools=[])
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        except Exception:
            return Outcome(reward=0.0)
        return Outcome(reward=1.0)


def test_an_engines_failure_is_no_reward() -> None:
    (one,) = run_agent(Swallows(), error=RequestRefusedError("ValueError: no"))
    assert (one.status, one.reward) == ("failed", None)
    environment = Swallows()
    with pytest.raises(EngineError, match="gone"):
        run_agent(environment, error=EngineError("The engine is gone."), number=3)
    assert (environment.num_begun, environment.num_cancelled) == (3, 2)


async def wait(client: openai.AsyncOpenAI) -> None:
    """Take longer than there is."""
    await my_agents.swallows(client)
    put_clock_forward(asyncio.get_running_loop(), LATE)
    await asyncio.sleep(600)


@pytest.mark.long
@pytest.mark.parametrize(("own", "run_s"), [(LATE, 2 * LATE), (None, LATE)])
def test_an_agent_out_of_time_was_not_sampled(own: float | None, run_s: float) -> None:
    (one,) = run_agent(AgentProgram(wait, timeout=own), "1", timeout=run_s)
    assert (one.status, one.reward) == ("timeout", None) and "took more than 1000 s" in str(one.error)
    assert one.num_sampled > 0


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: AgentProgram(), r"^AgentProgram needs one of agent \(a function\) and command \(a program\)\.$"),
        (lambda: AgentProgram("my_agents.nothing"), r"'my_agents' has no class or function 'nothing'"),
        (lambda: AgentProgram(my_agents.idle), r"agent=idle has neither a parameter 'client' nor 'base_url'\. Define"),
        (lambda: AgentProgram(my_agents.by_address, {"extra": 1}), r"got an unexpected keyword argument 'extra'"),
        (lambda: AgentProgram(command=["no-such-program"]), r"there is no program 'no-such-program'\. Install it"),
        (
            lambda: AgentProgram(command="python agent.py"),
            r"^environment\.command='python agent\.py' must be a list\. Write \['python', 'agent\.py'\]\.$",
        ),
        (lambda: AgentProgram(command=["true"], folder="/nowhere"), r"^environment\.folder=/nowhere is not a folder"),
        (lambda: AgentProgram(my_agents.two_turns, endpoint={"prot": 1}), r"unexpected keyword argument 'prot'"),
        (lambda: AgentProgram(my_agents.two_turns, endpoint={"host": "203.0.113.1"}), r"cannot be listened at: "),
        (
            lambda: AgentProgram(AGENT, num_workers=1, workers={"pyton": "x"}),
            r"workers=\{'pyton': 'x'\}: .*unexpected key",
        ),
        (lambda: AgentProgram(AGENT, num_workers=0, workers={"python": "x"}), r"needs num_workers\.$"),
        (
            lambda: AgentProgram(AGENT, num_workers=1, workers={"hang_timeout": 0}),
            r"^environment\.workers\.hang_timeout=0 must be above 0 seconds\.$",
        ),
        (
            lambda: AgentProgram(AGENT, max_trajectories=2048, endpoint={"max_connections": 3072}),
            r"the 4096 connections that max_trajectories=2048 may keep must be fewer than the 4096 idle ones that "
            r"endpoint\.max_connections=3072 allows\.$",
        ),
        (
            lambda: AgentProgram(AGENT, max_trajectories=3, endpoint={"max_sessions": 2}),
            r"endpoint\.max_sessions=2 must be at least max_trajectories=3\.$",
        ),
        (lambda: AgentProgram(AGENT, endpoint={"max_sessions": 0}), r"^endpoint\.max_sessions=0 must be at least 1\.$"),
        (lambda: AgentProgram(AGENT, num_workers=-1), r"num_workers=-1 must be at least 0\.$"),
        (lambda: AgentProgram(command=["true"], num_workers=2), r"a command is a process of its own\.$"),
    ],
)
def test_mistakes_are_one_line(make: Callable[[], AgentProgram], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        asyncio.run(make().check())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("max_trajectories", "endpoint", "most"),
    [
        (8, {}, 4096),
        (512, {}, 64 * 512),  # beside Endpoint's max_requests=64, no request of a trajectory is one too many
        (1024, {"max_connections": 2000}, 2000),  # beside 3024 idle connections, of which clients keep 2048
        (2048, {"max_connections": 3073}, 3073),
    ],
)
def test_endpoint_has_room_for_requests_and_idle_connections(
    max_trajectories: int, endpoint: dict[str, int], most: int
) -> None:
    agent = AgentProgram(AGENT, max_trajectories=max_trajectories, endpoint=endpoint)
    assert agent.endpoint.max_connections == most and agent.endpoint.max_idle_connections == most + 1024


def test_a_trainer_without_a_server_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ConfigError, match=r"uvicorn is not installed: pip install 'rlightning\[agents\]'\.$"):
        asyncio.run(AgentProgram(my_agents.two_turns).check())


PROGRAM = """\
import json, os, sys, urllib.request
given = json.load(sys.stdin)
assert given["columns"]["answer"] == "2" and given["messages"][0]["content"] == "1+1="
assert os.environ["OPENAI_AGENTS_DISABLE_TRACING"] == "1"  # or the key would be sent to OpenAI
assert os.listdir() == ["notes.txt"] and open("notes.txt").read() == "here" and sys.argv[1] == "2 is right"
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": given["messages"]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
open("left.txt", "w").write(answer)
print("x" * 300_000)
"""


def run_program(folder: Path, code: str, is_due: Callable[[], bool] | None = None, **arguments: Any) -> Trajectory:
    program, files = folder / "agent.py", folder / "files"
    program.write_text(PROGRAM + code)
    files.mkdir(exist_ok=True)
    (files / "notes.txt").write_text("here")
    command = [sys.executable, str(program), "{answer} is right"]
    (one,) = run_agent(AgentProgram(command=command, folder=str(files), **arguments), "2", is_due=is_due)
    assert [path.name for path in files.iterdir()] == ["notes.txt"]
    return one


@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "reward", "expected", "metrics"),
    [
        ('print(json.dumps({"reward": len(answer) / 4, "metrics": {"tries": 2}}))', "last_line", 0.25, {"tries": 2.0}),
        ("print(0.5)", "last_line", 0.5, {}),
        ("print('null')", "last_line", None, {}),
        ("sys.exit(0)", "exit_code", 1.0, {}),
        ("sys.exit(10)", "exit_code", 0.0, {}),
        ("", "none", None, {}),
    ],
)
def test_programs_give_their_reward(
    tmp_path: Path, code: str, reward: Any, expected: float | None, metrics: dict[str, float]
) -> None:
    one = run_program(tmp_path, code, reward=reward)
    assert (one.status, one.reward, one.error) == ("finished", expected, None)
    assert one.metrics == {"turns": 1.0, "branches": 1.0, "abandoned_requests": 0.0, "refused_requests": 0.0} | metrics


@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "reward", "reason"),
    [
        ("raise KeyError('no')", "last_line", "exit code 1"),
        ("sys.exit(2)", "exit_code", "exit code 2"),
        ("raise KeyError('no')", "exit_code", "exit code 1"),
        ("os.kill(os.getpid(), 9)", "none", "signal 9"),
        ("print('good')", "last_line", "the program's last line is 'good', and has to be its reward"),
        ("print('NaN')", "last_line", "the program's last line is 'NaN'"),
    ],
)
def test_programs_that_fail_were_not_sampled(tmp_path: Path, code: str, reward: Any, reason: str) -> None:
    one = run_program(tmp_path, code, reward=reward)
    assert (one.status, one.reward) == ("failed", None) and reason in str(one.error)


def test_arguments_are_of_any_length_and_filled_once() -> None:
    command = AgentCommand(["python", "-c", "pass\n" * 1000], None, {}, "none")
    assert command.command[2].startswith("pass")
    columns = {"question": "say {answer}", "answer": "2", "a|b": 3}
    assert _fill("{question} {answer} {a|b} {other}", columns) == "say {answer} 2 3 {other}"


@pytest.mark.processes
def test_a_program_out_of_time_leaves_nothing(tmp_path: Path) -> None:
    code = f"""
import subprocess, time
child = subprocess.Popen(["sleep", "600"])
with open({str(tmp_path / "writing")!r}, "w") as file:
    file.write(f"{{os.getpid()}} {{child.pid}}")
os.rename({str(tmp_path / "writing")!r}, {str(tmp_path / "pids")!r})
time.sleep(600)
"""
    one = run_program(tmp_path, code, (tmp_path / "pids").exists, timeout=LATE)
    assert one.status == "timeout" and one.num_sampled > 0
    assert still_running(map(int, (tmp_path / "pids").read_text().split())) == []


@pytest.mark.processes
def test_a_child_that_holds_its_pipes_delays_nothing(tmp_path: Path) -> None:
    assert run_program(tmp_path, "import subprocess\nsubprocess.Popen(['sleep', '600'])\nprint(1.0)").reward == 1.0


@pytest.mark.processes
def test_killed_trainer_leaves_no_program(tmp_path: Path) -> None:
    program = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    trainer = tmp_path / "trainer.py"
    trainer.write_text(
        "import asyncio, os, sys\nfrom rlightning.environments.agent_command import run_process\n"
        f"command = [sys.executable, '-c', {program!r}]\n"
        "asyncio.run(run_process(command, stdin=b'', folder='.', environment=os.environ))\n"
    )
    process = subprocess.Popen([sys.executable, str(trainer)])
    wait_for(lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text()))
    process.kill()
    process.wait()
    assert still_running([int((tmp_path / "pid").read_text())]) == []
