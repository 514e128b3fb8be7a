"""What tests of the endpoint share: messages, a tool, a policy that says given texts, and a request."""

from collections.abc import Sequence
from typing import Any

import openai
from agent_cases import ScriptedSampler, make_policy
from chat_templates import make_tokenizer

from rlightning.environments.policy import RecordedPolicy

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1,  "b": 2}}\n</tool_call>'
END = "<|im_end|>"
USER: dict[str, Any] = {"role": "user", "content": "1+2?"}
SYSTEM: dict[str, Any] = {"role": "system", "content": "Add."}
SAID = {"role": "assistant", "content": "One."}
MORE = {"role": "user", "content": "More."}


def make(*said: str, family: str = "qwen3", **arguments: Any) -> tuple[RecordedPolicy, ScriptedSampler, Any]:
    tokenizer = make_tokenizer(family)
    sampler = ScriptedSampler(tokenizer, *said, end=END, delay=arguments.pop("delay", 0.0))
    return make_policy(sampler, tokenizer, **arguments), sampler, tokenizer


async def ask(client: openai.AsyncOpenAI, messages: Sequence[Any], **arguments: Any) -> Any:
    return await client.chat.completions.create(model="any", messages=list(messages), **arguments)
