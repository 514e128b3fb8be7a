"""Agents of LangChain: what their requests sample is trained once, by each API that they may use."""

import asyncio
from typing import Any

import pytest
from agent_cases import finish, serve, texts, trained
from attempts import attempt, say
from endpoint_cases import CALL, END, make
from waiting import PATIENCE_SECONDS

from rlightning.environments import AgentProgram
from rlightning.types import Prompt

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("forget_clients")]
CALLS = f"<think>\nhm\n</think>\n\nLet me.\n{CALL}\n{CALL}"


def make_agent(base_url: str, api_key: str, **options: Any) -> Any:
    """An agent with a tool; LangChain takes seconds to import, which is not done while tests are collected."""
    chains, models = pytest.importorskip("langchain.agents"), pytest.importorskip("langchain_openai")
    model = models.ChatOpenAI(base_url=base_url, api_key=api_key, model="any", **options)
    return chains.create_agent(model, [add], system_prompt="Add.")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.mark.parametrize("use_responses_api", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
def test_agent_with_a_tool_is_one_branch(use_responses_api: bool, streaming: bool) -> None:
    policy, _, tokenizer = make(CALLS, "It is 3.", "Yes.")
    options = {"use_responses_api": use_responses_api, "streaming": streaming, "stream_usage": True}

    async def talk() -> list[Any]:
        async with serve(policy) as (session, url):
            agent = make_agent(f"{url}/v1", session.key, **options)
            first = await agent.ainvoke({"messages": [{"role": "user", "content": "1+2?"}]})
            last = await agent.ainvoke({"messages": [*first["messages"], {"role": "user", "content": "Sure?"}]})
            return list(last["messages"])

    messages = asyncio.run(asyncio.wait_for(talk(), PATIENCE_SECONDS))
    assert [message.text for message in messages] == ["1+2?", "Let me.", "3", "3", "It is 3.", "Sure?", "Yes."]
    assert messages[4].usage_metadata["output_tokens"] == len(tokenizer("It is 3." + END).input_ids)
    trajectory = finish(policy)
    assert [branch.reason for branch in trajectory.branches] == ["start"]
    assert trained(trajectory, tokenizer) == [f"{CALLS}{END}It is 3.{END}Yes.{END}"]
    results = "\n<|im_start|>user" + "\n<tool_response>\n3\n</tool_response>" * 2 + f"{END}\n<|im_start|>assistant\n"
    assert f"{CALLS}{END}{results}It is 3.{END}" in texts(trajectory, tokenizer)[0]


async def goes_on(base_url: str, api_key: str) -> float:
    """Ask again and again, each time with all of the history."""
    agent = make_agent(base_url, api_key)
    state: dict[str, Any] = {"messages": []}
    while True:
        state = await agent.ainvoke({"messages": [*state["messages"], {"role": "user", "content": "more"}]})


def test_agent_without_more_room_is_truncated() -> None:
    pytest.importorskip("langchain_openai")
    (one,) = attempt(AgentProgram(goes_on), say(*["1"] * 99), Prompt(0, "1+1=", [1, 2], {"prompt": "1+1="}))
    assert one.status == "truncated" and "The agent ended there: " in str(one.error) and one.num_sampled > 0
