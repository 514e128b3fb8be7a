"""What tests of the endpoint share: messages, a policy that says given texts, and a request."""

import asyncio
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from agent_cases import ScriptedSampler, connect, make_policy, serve
from chat_templates import make_tokenizer

from rlightning.environments.policy import RecordedPolicy

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1,  "b": 2}}\n</tool_call>'
END = "<|im_end|>"
USER: dict[str, Any] = {"role": "user", "content": "1+2?"}
SYSTEM: dict[str, Any] = {"role": "system", "content": "Add."}
SAID = {"role": "assistant", "content": "One."}
MORE = {"role": "user", "content": "More."}


def make(
    *said: str, family: str = "qwen3", kind: Any = ScriptedSampler, delay: float = 0.0, **arguments: Any
) -> tuple[RecordedPolicy, Any, Any]:
    tokenizer = make_tokenizer(family)
    sampler = kind(tokenizer, *said, end=END, delay=delay)
    return make_policy(sampler, tokenizer, **arguments), sampler, tokenizer


async def ask(client: openai.AsyncOpenAI, messages: Sequence[Any], **arguments: Any) -> Any:
    return await client.chat.completions.create(model="any", messages=list(messages), **arguments)


def get_refusal(
    policy: RecordedPolicy, messages: Sequence[Any] = (USER,), allowed: Sequence[str] = (), **arguments: Any
) -> openai.BadRequestError:
    """The error of a request, after which the session goes on."""

    async def talk() -> openai.BadRequestError:
        async with serve(policy, allowed=allowed) as (session, url), connect(session, url) as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await ask(client, messages, **arguments)
        return caught.value

    return asyncio.run(talk())
