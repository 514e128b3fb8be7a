"""Agents of the OpenAI Agents SDK: what their requests sample is trained once, by each API that they may use."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import openai
import pytest
from agent_cases import run, texts, trained
from attempts import answers, attempt, say, write_call
from endpoint_cases import CALL, END, make

from rlightning.environments import AgentProgram
from rlightning.rollout import Sampling
from rlightning.types import Prompt

pytestmark = pytest.mark.long
CALLS = f"<think>\nhm\n</think>\n\nLet me.\n{CALL}\n{CALL}"
APIS = pytest.mark.parametrize("api", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])


@pytest.fixture(scope="module", autouse=True)
def sdk() -> Any:
    """The SDK, which takes seconds to import: not while tests are collected."""
    return pytest.importorskip("agents")


def make_agent(client: openai.AsyncOpenAI, api: str = "OpenAIResponsesModel", **options: Any) -> Any:
    agents: Any = import_module("agents")
    return agents.Agent(**{"name": "Al", "model": getattr(agents, api)("any", client)} | options)


def make_tool() -> Any:
    agents: Any = import_module("agents")

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    return agents.function_tool(add)


async def ask(agent: Any, given: Any, is_streamed: bool = False) -> Any:
    agents: Any = import_module("agents")
    config = agents.RunConfig(tracing_disabled=True)
    if not is_streamed:
        return await agents.Runner.run(agent, given, run_config=config)
    result = agents.Runner.run_streamed(agent, given, run_config=config)
    async for _ in result.stream_events():
        pass
    return result


@APIS
@pytest.mark.parametrize("is_streamed", [False, True])
def test_agent_with_a_tool_is_one_branch(sdk: Any, api: str, is_streamed: bool) -> None:
    policy, _, tokenizer = make(CALLS, "It is 3.", "Yes.")
    settings = sdk.ModelSettings(include_usage=True, store=True, metadata={"a": "b"}, parallel_tool_calls=True)

    async def use(client: openai.AsyncOpenAI) -> None:
        agent = make_agent(client, api, instructions="Add.", tools=[make_tool()], model_settings=settings)
        first = await ask(agent, "1+2?", is_streamed)
        assert first.final_output == "It is 3." and first.context_wrapper.usage.requests == 2
        more = [*first.to_input_list(), {"role": "user", "content": "Sure?"}]
        assert (await ask(agent, more, is_streamed)).final_output == "Yes."

    trajectory = run(policy, use)
    assert [branch.reason for branch in trajectory.branches] == ["start"]
    assert trained(trajectory, tokenizer) == [f"{CALLS}{END}It is 3.{END}Yes.{END}"]
    results = "\n<|im_start|>user" + "\n<tool_response>\n3\n</tool_response>" * 2 + f"{END}\n<|im_start|>assistant\n"
    assert f"{CALLS}{END}{results}It is 3.{END}" in texts(trajectory, tokenizer)[0]


@APIS
def test_settings_of_the_sdks_default_model_are_taken(sdk: Any, api: str) -> None:
    policy, _, _ = make("Hi.")

    async def use(client: openai.AsyncOpenAI) -> None:
        provider = sdk.OpenAIProvider(openai_client=client, use_responses=api == "OpenAIResponsesModel")
        settings = sdk.models.get_default_model_settings()
        assert settings.reasoning is not None and settings.verbosity is not None
        agent = make_agent(client, model=provider.get_model(None), model_settings=settings)
        assert (await ask(agent, "Hello.")).final_output == "Hi."

    assert len(run(policy, use).branches) == 1


@APIS
def test_sub_agents_and_handoffs_are_branches(api: str) -> None:
    said = [write_call("ask_bob", input="Bob, 1+2?"), "Three.", write_call("transfer_to_bob"), "I am Bob."]
    policy, _, tokenizer = make(*said)

    async def use(client: openai.AsyncOpenAI) -> None:
        bob = make_agent(client, api, name="Bob", instructions="Be Bob.")
        agent = make_agent(client, api, tools=[bob.as_tool("ask_bob", "Ask Bob.")], handoffs=[bob])
        assert (await ask(agent, "1+2?")).final_output == "I am Bob."

    trajectory = run(policy, use)
    assert [branch.reason for branch in trajectory.branches] == ["start", "started_over", "tools_changed"]
    assert trained(trajectory, tokenizer) == [f"{said[0]}{END}{said[2]}{END}", f"Three.{END}", f"I am Bob.{END}"]


async def goes_on(client: openai.AsyncOpenAI) -> float:
    """Ask again and again, each time with all of the history."""
    agent = make_agent(client)
    items: list[Any] = []
    while True:
        items = (await ask(agent, [*items, {"role": "user", "content": "more"}])).to_input_list()


def test_agent_without_more_room_is_truncated() -> None:
    (one,) = attempt(AgentProgram(goes_on), say(*["1"] * 99), Prompt(0, "1+1=", [1, 2], {"prompt": "1+1="}))
    assert one.status == "truncated" and "The agent ended there: " in str(one.error) and one.num_sampled > 0


PROGRAM = '''\
import json, sys
import agents

def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

agent = agents.Agent(name="calculator", tools=[agents.function_tool(add)])
question = json.load(sys.stdin)["columns"]["prompt"]
print(float(agents.Runner.run_sync(agent, question).final_output == "It is 3."))
'''


@pytest.mark.processes
def test_program_with_the_sdks_defaults_reaches_the_policy(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(PROGRAM)
    environment = AgentProgram(command=[sys.executable, str(tmp_path / "agent.py")])
    sampling = Sampling(max_new_tokens=200)
    prompt = Prompt(0, "1+2?", [1, 2], {"prompt": "1+2?"})
    (one,) = attempt(environment, say(CALL, "It is 3."), prompt, sampling=sampling, max_length=4000)
    assert (one.status, one.error, one.reward, len(one.branches)) == ("finished", None, 1.0, 1)
    assert answers(one) == ["3"] and one.metrics["refused_requests"] == 0
