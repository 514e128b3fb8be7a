"""Anthropic's messages, as chats: ``/v1/messages``."""

import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from rlightning.environments.endpoint.errors import APIError, reading
from rlightning.environments.endpoint.openai_api import Reply, read_tools
from rlightning.environments.endpoint.parameters import read_asked, refuse_choices
from rlightning.environments.endpoint.session import Answers, Session, ToolUse
from rlightning.environments.messages import Message
from rlightning.foreign_text import cut_value

OWN = ("messages", "system", "tools", "tool_choice")
NAMES = {"stop_sequences": "stop"}
CHOICES = {"auto": "auto", "none": "none"}


async def create_message(session: Session, body: Mapping[str, Any]) -> Reply:
    """Answer ``/v1/messages``."""
    renamed = {NAMES.get(name, name): value for name, value in body.items()}
    thinking = body.get("thinking") or {"type": "disabled"}
    if thinking != {"type": "disabled"} and "thinking" not in session.ignored:
        raise APIError(
            f"thinking={cut_value(thinking)} is not supported: the policy thinks as its chat template has it. Leave it "
            "out, or add 'thinking' to the endpoint's ignored parameters (environment.endpoint.ignored).",
            param="thinking",
        )
    renamed.pop("thinking", None)
    refuse_choices(body)
    asked = read_asked(renamed, session.policy.sampling, ignored=session.ignored, others=OWN)
    with reading("messages"):
        messages = list(_read_messages(body))
    with reading("tools"):
        tools = _read_tools(body, session.ignored)
    answers = await session.chat(asked, messages, tools)
    message = _write_message(answers, asked.stops, session.model)
    return list(_stream(message)) if asked.stream else message


def _read_messages(body: Mapping[str, Any]) -> Iterator[Message]:
    """Yield the chat's messages."""
    if body.get("system"):
        yield {"role": "system", "content": body["system"]}
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(one, Mapping) and "role" in one for one in messages):
        raise APIError(f"messages={cut_value(messages)} has to be a list of messages.", param="messages")
    for message in messages:
        content = message.get("content") or []
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        yield from _read_assistant(blocks) if message["role"] == "assistant" else _read_user(message["role"], blocks)


def _read_assistant(blocks: list[Any]) -> Iterator[Message]:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        if block.get("type") == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif block.get("type") == "thinking":
            thoughts.append(str(block.get("thinking")))
        else:
            texts.append(block)
    yield {"role": "assistant", "content": texts, "tool_calls": calls, "reasoning_content": "\n".join(thoughts)}


def _read_user(role: str, blocks: list[Any]) -> Iterator[Message]:
    rest = []
    for block in blocks:
        if block.get("type") == "tool_result":
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")}
        else:
            rest.append(block)
    if rest or not blocks:
        yield {"role": role, "content": rest}


def _read_tools(body: Mapping[str, Any], ignored: frozenset[str]) -> ToolUse:
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.get("name"),
                "description": tool.get("description", ""),
                "parameters": tool.get("input_schema"),
            },
        }
        for tool in body.get("tools") or []
    ]
    choice = body.get("tool_choice") or {"type": "auto"}
    return read_tools({"tools": tools, "tool_choice": CHOICES.get(str(choice.get("type")), choice)}, ignored)


def _write_message(answers: Answers, stops: list[str], model: str) -> dict[str, Any]:
    (turn,) = answers.turns
    message, sample = turn.message, turn.sample
    content: list[dict[str, Any]] = []
    if message.reasoning:
        content.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content:
        content.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)})
    stop = next((stop for stop in stops if sample.finish_reason == "stop" and stop in sample.text), None)
    reason = "max_tokens" if sample.is_truncated else "tool_use" if message.tool_calls else "end_turn"
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": reason if stop is None else "stop_sequence",
        "stop_sequence": stop,
        "usage": {"input_tokens": answers.num_prompt_tokens, "output_tokens": len(sample.token_ids)},
    }


def _stream(message: dict[str, Any]) -> Iterator[tuple[str | None, Any]]:
    """Yield a message as the events of a stream."""

    def event(kind: str, **fields: Any) -> tuple[str, dict[str, Any]]:
        return kind, {"type": kind, **fields}

    start = {**message, "content": [], "stop_reason": None, "stop_sequence": None}
    yield event("message_start", message={**start, "usage": {**message["usage"], "output_tokens": 0}})
    for index, block in enumerate(message["content"]):
        field = {"text": "text", "thinking": "thinking", "tool_use": "input"}[block["type"]]
        value = block[field]
        yield event("content_block_start", index=index, content_block={**block, field: {} if field == "input" else ""})
        delta = {
            "text": {"type": "text_delta", "text": value},
            "thinking": {"type": "thinking_delta", "thinking": value},
            "input": {"type": "input_json_delta", "partial_json": json.dumps(value)},
        }[field]
        yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    ends = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    yield event("message_delta", delta=ends, usage={"output_tokens": message["usage"]["output_tokens"]})
    yield event("message_stop")
