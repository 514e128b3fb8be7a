"""Agents that add by a tool, each through another client; they know nothing of being trained, nor of each other."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import openai
from tool_cases import add

from rlightning.environments import AgentProgram, Tools

(SCHEMA,) = (tool.schema for tool in Tools([add])._tools.values())
MAX_TURNS = 4
NAMED = {"name": "add", "description": SCHEMA["function"]["description"]}


class Guess:
    """A game of two turns, the second of which the prompt of the first says nothing about."""

    def reset(self, prompt: Any) -> str:
        self.num_steps = 0
        return str(prompt.columns["prompt"])

    def step(self, message: Any) -> Any:
        self.num_steps += 1
        return "More.", 0.25, self.num_steps == 2, {"length": len(message["content"] or "")}


def compute(arguments: dict[str, Any]) -> str:
    """The tool's result as text; what is wrong with its arguments if the model wrote others than it takes."""
    try:
        return str(add(**arguments))
    except TypeError as error:
        return f"Error: {error}"


async def by_openai(client: openai.AsyncOpenAI, prompt: Any) -> float:
    """Stream the turns, and put the calls together from their parts."""
    tools: Any = [SCHEMA]
    messages: list[Any] = [{"role": "user", "content": prompt.columns["prompt"]}]
    for _ in range(MAX_TURNS):
        content, calls = "", dict[int, dict[str, Any]]()
        stream: Any = await client.chat.completions.create(model="any", messages=messages, tools=tools, stream=True)
        async for chunk in stream:
            for choice in chunk.choices:
                content += choice.delta.content or ""
                for part in choice.delta.tool_calls or ():
                    call = calls.setdefault(part.index, {"id": part.id, "name": part.function.name, "arguments": ""})
                    call["arguments"] += part.function.arguments or ""
        if not calls:
            return float(content == prompt.columns["answer"])
        functions = [{"id": call.pop("id"), "type": "function", "function": call} for call in calls.values()]
        messages.append({"role": "assistant", "content": content or None, "tool_calls": functions})
        for call in functions:
            result = compute(json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return 0.0


async def by_anthropic(base_url: str, api_key: str, model: str, prompt: Any) -> float:
    """Use Anthropic's SDK, whose messages are made of blocks."""
    import anthropic

    tools: Any = [{**NAMED, "input_schema": SCHEMA["function"]["parameters"]}]
    messages: list[Any] = [{"role": "user", "content": prompt.columns["prompt"]}]
    async with anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key) as client:
        for _ in range(MAX_TURNS):
            reply = await client.messages.create(model=model, max_tokens=90, messages=messages, tools=tools)
            results = list(use_tools(reply.content))
            if not results:
                texts = [block.text for block in reply.content if block.type == "text"]
                return float("".join(texts) == prompt.columns["answer"])
            messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
    return 0.0


def use_tools(blocks: Any) -> Iterator[dict[str, Any]]:
    """The blocks that answer those of a turn that are calls."""
    for block in blocks:
        if block.type == "tool_use":
            yield {"type": "tool_result", "tool_use_id": block.id, "content": compute(block.input)}


PROGRAM = """\
import json, os, sys, urllib.request
schema, given = json.loads(sys.argv[1]), json.load(sys.stdin)
messages = given["messages"]
for _ in range(int(sys.argv[2])):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": [schema]}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    if not message.get("tool_calls"):
        break
    messages.append(message)
    for call in message["tool_calls"]:
        total = sum(value for value in json.loads(call["function"]["arguments"]).values() if type(value) is int)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(total)})
print(float(message["content"] == given["columns"]["answer"]))
"""


def by_command() -> AgentProgram:
    """A program without packages, isolated from those of its Python, which would take it time to look for."""
    return AgentProgram(command=[sys.executable, "-I", "-S", "-c", PROGRAM, json.dumps(SCHEMA), str(MAX_TURNS)])
