"""OpenAI's responses, as chats: ``/v1/responses``."""

import secrets
import time
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from rlightning.environments.endpoint.errors import APIError, reading
from rlightning.environments.endpoint.openai_api import Reply, count_usage, read_tools
from rlightning.environments.endpoint.parameters import read_asked, refuse_choices
from rlightning.environments.endpoint.session import Answers, Session, ToolUse
from rlightning.environments.messages import Message
from rlightning.foreign_text import cut_value

OWN = ("input", "instructions", "tools", "tool_choice", "previous_response_id")
NAMES = {"max_output_tokens": "max_tokens"}
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "text": ({"format": {"type": "text"}}, {}),
    "truncation": ("disabled",),
    "background": (False,),
    "reasoning": ({},),
}
"""Parameters of this route alone, by the values with which they change nothing."""


async def respond(session: Session, body: Mapping[str, Any]) -> Reply:
    """Answer ``/v1/responses``."""
    renamed = {NAMES.get(name, name): value for name, value in body.items() if value not in NEUTRAL.get(name, ())}
    refuse_choices(body)
    asked = read_asked(renamed, session.policy.sampling, ignored=session.ignored, others=OWN)
    with reading("input"):
        messages = [*_read_earlier(session, body), *_read_input(body.get("input"))]
    with reading("tools"):
        tools = _read_tools(body, session.ignored)
    instructions = body.get("instructions")
    head = [{"role": "system", "content": instructions}] if instructions else []
    answers = await session.chat(asked, head + messages, tools)
    response = _write_response(answers, body, session.model)
    session.responses[response["id"]] = [*messages, answers.turns[0].message.to_message()]
    return list(_stream(response)) if asked.stream else response


def _read_earlier(session: Session, body: Mapping[str, Any]) -> list[Message]:
    earlier = body.get("previous_response_id")
    if earlier is not None and earlier not in session.responses:
        raise APIError(f"previous_response_id={cut_value(earlier)} is none of this session's.", 404)
    return session.responses.get(str(earlier), [])


def _read_input(given: Any) -> list[Message]:
    """Return the chat's messages; what the policy wrote in one turn comes in several items."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise APIError(f"input={cut_value(given)} has to be a text or a list of items.", param="input")
    messages: list[Message] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind == "message" and item.get("role") != "assistant":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind in ("message", "function_call", "reasoning"):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            _add_item(messages[-1], kind, item)
        else:
            raise APIError(f"input: items of type '{kind}' are not supported.", param="input")
    return messages


def _add_item(message: Message, kind: str, item: Mapping[str, Any]) -> None:
    if kind == "message":
        message["content"] = item.get("content")
    elif kind == "reasoning":
        message["reasoning_content"] = "\n".join(str(part.get("text")) for part in item.get("content") or [])
    else:
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)


def _read_tools(body: Mapping[str, Any], ignored: frozenset[str]) -> ToolUse:
    tools = body.get("tools") or []
    for tool in tools:
        if tool.get("type") != "function":
            raise APIError(f"tools: tools of type '{tool.get('type')}' are not supported.", param="tools")
    names = ("name", "description", "parameters")
    functions = [{"type": "function", "function": {name: tool.get(name) for name in names}} for tool in tools]
    return read_tools({"tools": functions, "tool_choice": body.get("tool_choice")}, ignored)


def _write_response(answers: Answers, body: Mapping[str, Any], model: str) -> dict[str, Any]:
    (turn,) = answers.turns
    message, is_cut, usage = turn.message, turn.sample.is_truncated, count_usage(answers)
    status = "incomplete" if is_cut else "completed"
    output: list[dict[str, Any]] = []
    if message.reasoning:
        parts = [{"type": "reasoning_text", "text": message.reasoning}]
        output.append({"id": _make_id("rs"), "type": "reasoning", "summary": [], "content": parts, "status": status})
    if message.content or not message.tool_calls:
        part = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
        item = {"id": _make_id("msg"), "type": "message", "role": "assistant", "content": [part], "status": status}
        output.append(item)
    for call in message.tool_calls:
        named = {"call_id": call.id, "name": call.name, "arguments": call.arguments, "status": status}
        output.append({"id": _make_id("fc"), "type": "function_call", **named})
    return {
        "id": _make_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "output": output,
        "instructions": body.get("instructions"),
        "tools": body.get("tools") or [],
        "tool_choice": body.get("tool_choice") or "auto",
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "metadata": body.get("metadata") or {},
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _stream(response: dict[str, Any]) -> Iterator[tuple[str | None, Any]]:
    """Yield a response as the events of a stream."""
    numbers = count()

    def event(kind: str, **fields: Any) -> tuple[str, dict[str, Any]]:
        return kind, {"type": kind, "sequence_number": next(numbers), **fields}

    begun = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield event("response.created", response=begun)
    for index, item in enumerate(response["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield event("response.output_item.added", output_index=index, item={**item, **empty, "status": "in_progress"})
        if item["type"] == "function_call":
            yield event("response.function_call_arguments.delta", **place, delta=item["arguments"])
            yield event(
                "response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"]
            )
        else:
            (part,), at = item["content"], {**place, "content_index": 0}
            kind = "output_text" if part["type"] == "output_text" else "reasoning_text"
            extra: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
            yield event("response.content_part.added", **at, part={**part, "text": ""})
            yield event(f"response.{kind}.delta", **at, delta=part["text"], **extra)
            yield event(f"response.{kind}.done", **at, text=part["text"], **extra)
            yield event("response.content_part.done", **at, part=part)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event(f"response.{response['status']}", response=response)


def _make_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
