"""The snippets of docs/agents.md run as they are written."""

import asyncio
import inspect
import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from attempts import answers, attempt, say, write_call
from chat_templates import make_tokenizer
from pages import find_snippets, load_module, read_environment, read_section
from waiting import PATIENCE_SECONDS

from rlightning.environments import AgentProgram, Environment, StepEnvironment, Tools
from rlightning.environments.chat_format import ChatFormat
from rlightning.environments.endpoint import Endpoint
from rlightning.environments.endpoint.server import ROUTES
from rlightning.environments.verifiers import Verifiers
from rlightning.rollout import Sampling
from rlightning.types import BranchReason, Prompt, Trajectory

WAYS, TOOLS, PROGRAMS, ENDPOINT = (
    read_section("agents.md", heading) for heading in ("Four ways", "Tools", "Agent programs", "The endpoint")
)
PROMPT = Prompt(0, "2+2=", [5, 6], {"prompt": "2+2=", "answer": "4"})


def play(environment: Environment, *texts: str) -> Trajectory:
    sampling = Sampling(max_new_tokens=200)
    (trajectory,) = attempt(environment, say(*texts, family="qwen3"), PROMPT, sampling=sampling, max_length=4000)
    assert (trajectory.status, trajectory.error) == ("finished", None)
    return trajectory


def test_each_way_runs_as_the_page_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, snippet in zip(("my_tools", "my_games", "my_agents"), find_snippets(WAYS), strict=True):
        load_module(name, snippet, monkeypatch)

    def make(number: int, kind: type[Environment]) -> Environment:
        found = read_environment(WAYS, number)
        assert found["class_path"].rpartition(".")[2] == kind.__name__
        return kind(**found["init_args"])

    called = play(make(0, Tools), write_call("add", a=2, b=2), "4")
    assert [turn.message["content"] for turn in called.turns[1:]] == ["4", "4"]
    assert play(make(1, StepEnvironment), "5", "4").turn_rewards == [0.0, 1.0]
    assert play(make(2, AgentProgram), "4").reward == 1.0
    verifiers = make(3, Verifiers)
    assert isinstance(verifiers, Verifiers) and verifiers.config["taskset"]["game"] == "Hangman-v0"


@pytest.mark.processes
def test_tools_of_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tools = load_module("my_tools", find_snippets(TOOLS)[0], monkeypatch)
    monkeypatch.setitem(tools.sandbox._limits, "wall_seconds", PATIENCE_SECONDS)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "manual.txt").write_text("one two\ntwo three\n")
    environment = Tools(**read_environment(TOOLS)["init_args"])
    calls = [
        write_call("run_python", program="print(6 * 7)"),
        write_call("search", words=["two", "three"]),
        write_call("read"),
    ]
    trajectory = play(environment, write_call("write", title="a", note="b"), "\n".join(calls), "42")
    assert answers(trajectory) == ["written", "42\n", '["two three"]', json.dumps({"a": "b"})]
    assert trajectory.metrics == {"turns": 3.0, "tool_calls": 4.0, "tool_failures": 0.0}


def test_environment_of_tools_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = load_module("my_environment", find_snippets(TOOLS)[1], monkeypatch).AsksOnce()
    calls = [write_call("double", number=number) for number in (2, "2", 3)]
    trajectory = play(environment, "\n".join(calls), "4")
    assert trajectory.reward == 1.0
    assert answers(trajectory) == ["4", "number is '2', and has to be of type integer.", "6"]
    assert play(environment, "4").reward == 1.0


def test_line_of_the_log_is_what_is_logged() -> None:
    (line,) = re.findall(r"^ *(Chats: .*), \.\.\.$", TOOLS, re.MULTILINE)
    assert ChatFormat(make_tokenizer("qwen3")).describe().startswith(line)


@pytest.mark.long
def test_agent_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = find_snippets(PROGRAMS)[0]
    (tmp_path / "my_agents_of_docs.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = read_environment(PROGRAMS.replace("my_agents", "my_agents_of_docs"))["init_args"]
    prompt = Prompt(3, "1+1=", [1, 2], {"prompt": "1+1=", "answer": "2"})
    for texts, reward, turns in ((["Two.", "#### 2"], 1.0, 2), (["Two."] * 4, 0.0, 4)):
        (one,) = attempt(AgentProgram(**arguments), say(*texts), prompt)
        assert (one.status, one.reward, len(one.samples), len(one.branches)) == ("finished", reward, turns, 1)


@pytest.mark.long
@pytest.mark.parametrize(("number", "package"), [(1, "langchain_openai"), (2, "agents")])
@pytest.mark.usefixtures("forget_clients")
def test_agents_of_frameworks_of_the_page(number: int, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(package)
    agent = load_module("my_agents", find_snippets(PROGRAMS)[number], monkeypatch).solve
    call = write_call("add", a=2, b=2)
    for texts, reward in (([call, "4"], 1.0), ([call, "5"], 0.0), ([call] * 9, 0.0)):
        trajectory = play(AgentProgram(agent), *texts)
        assert (trajectory.reward, len(trajectory.branches)) == (reward, 1)
        assert trajectory.num_sampled == sum(map(sum, (branch.is_sampled for branch in trajectory.branches)))
        assert set(answers(trajectory)) == {"4"}


def test_keys_of_the_page() -> None:
    assert AgentProgram(**read_environment(PROGRAMS, 1)["init_args"]).command is not None
    for key in inspect.signature(Endpoint).parameters:
        assert f"`{key}`" in ENDPOINT
    assert [route for route in ROUTES if f"| `{route}` |" not in ENDPOINT] == []
    assert [reason for reason in get_args(BranchReason) if f"`{reason}`" not in ENDPOINT] == []


def test_environment_with_an_endpoint_of_the_page() -> None:
    async def my_client(base_url: str, key: str, prompt: Any) -> float:
        import openai

        async with openai.AsyncOpenAI(base_url=base_url, api_key=key) as client:
            answer = await client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": prompt.text}], top_p=0.5
            )
        return len(answer.choices[0].message.content or "")

    names: dict[str, Any] = {"my_client": my_client}
    exec(find_snippets(ENDPOINT)[0], names)
    assert play(names["OwnClient"](), "Two.").reward == 4.0
    asyncio.run(names["OwnClient"]().close())
