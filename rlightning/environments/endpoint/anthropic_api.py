"""The route ``/v1/messages`` of Anthropic's API, converted to and from chats."""

import json
import secrets
from collections.abc import Iterator, Mapping
from functools import partial

from rlightning.environments.endpoint.errors import APIError, reading
from rlightning.environments.endpoint.openai_api import read_tools
from rlightning.environments.endpoint.parameters import (
    RequestParameters,
    log_left_to_template,
    read_parameters,
    refuse_choices,
)
from rlightning.environments.endpoint.session import Session, ToolUse
from rlightning.environments.endpoint.streaming import Answers, BlockWriter, Emit, Event, Reply, answer
from rlightning.environments.messages import AssistantMessage, Message
from rlightning.foreign_text import cut_value
from rlightning.python_values import JsonObject

OWN = ("messages", "system", "tools", "tool_choice")
NAMES = {"stop_sequences": "stop"}
CHOICES = {"auto": "auto", "none": "none"}
EMPTY_TEXT = {"type": "text", "text": ""}


async def create_message(session: Session, body: JsonObject, emit: Emit) -> Reply:
    """Return the policy's next turn as the response to ``/v1/messages``, Anthropic's chat API; None if it was streamed.

    ``emit`` gets the events of a stream. Raises an APIError for an invalid request.
    """
    asked, messages, tools = _read_request(session, body)
    writer = MessageWriter(asked.stops, session.model)
    return await answer(writer, emit if asked.stream else None, partial(session.chat, asked, messages, tools))


async def count_tokens(session: Session, body: JsonObject, emit: Emit) -> Reply:
    """Return the number of tokens of a request's prompt as the response to ``/v1/messages/count_tokens``.

    It is that of the same request to ``/v1/messages``. Raises an APIError for an invalid request.
    """
    _, messages, tools = _read_request(session, body)
    return {"input_tokens": session.count_tokens(messages, tools)}


def _read_request(session: Session, body: JsonObject) -> tuple[RequestParameters, list[Message], ToolUse]:
    renamed = {NAMES.get(name, name): value for name, value in body.items()}
    config = body.get("output_config")
    if isinstance(config, Mapping) and not config.keys() - {"effort"}:
        del renamed["output_config"]
        log_left_to_template("output_config.effort")
    refuse_choices(body)
    asked = read_parameters(
        renamed, session.policy.sampling, ignored=session.ignored, allowed=session.allowed, others=OWN
    )
    with reading("messages"):
        messages = list(_read_messages(body))
    with reading("tools"):
        return asked, messages, _read_tools(body, session.ignored)


def _read_messages(body: JsonObject) -> Iterator[Message]:
    """Yield the messages of the chat in a request."""
    if body.get("system"):
        yield {"role": "system", "content": body["system"]}
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(one, Mapping) and "role" in one for one in messages):
        raise APIError(f"messages={cut_value(messages)} has to be a list of messages.", param="messages")
    for message in messages:
        content = message.get("content") or []
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        yield from _read_assistant(blocks) if message["role"] == "assistant" else _read_user(message["role"], blocks)


def _read_assistant(blocks: list[JsonObject]) -> Iterator[Message]:
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


def _read_user(role: str, blocks: list[JsonObject]) -> Iterator[Message]:
    rest = []
    for block in blocks:
        if block.get("type") == "tool_result":
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")}
        else:
            rest.append(block)
    if rest or not blocks:
        yield {"role": role, "content": rest}


def _read_tools(body: JsonObject, ignored: frozenset[str]) -> ToolUse:
    for tool in body.get("tools") or []:
        if tool.get("type") not in (None, "custom"):
            raise APIError(f"tools: tools of type '{tool['type']}' are not supported.", param="tools")
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
    if choice.get("disable_parallel_tool_use") and "tool_choice" not in ignored:
        raise APIError(
            "tool_choice.disable_parallel_tool_use is not supported: what the policy writes is not constrained. Leave "
            "it out, or add 'tool_choice' to the endpoint's ignored parameters (environment.endpoint.ignored).",
            param="tool_choice",
            code="unsupported_parameter",
        )
    return read_tools({"tools": tools, "tool_choice": CHOICES.get(str(choice.get("type")), choice)}, ignored)


def _write_content(message: AssistantMessage) -> Iterator[JsonObject]:
    """Yield the content blocks of a turn."""
    if message.reasoning:
        yield {"type": "thinking", "thinking": message.reasoning, "signature": ""}
    if message.content:
        yield {"type": "text", "text": message.content}
    for call in message.tool_calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}


def _event(kind: str, **fields: object) -> Event:
    return kind, {"type": kind, **fields}


class MessageWriter(BlockWriter):
    """Formats a turn as a response of Anthropic's API, whole or as stream events; tool calls are sent whole."""

    def __init__(self, stops: list[str], model: str) -> None:
        super().__init__()
        self._stops = stops
        self._head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": model}

    def write(self, answers: Answers) -> JsonObject:
        """Return the whole response in the form of Anthropic's Messages API."""
        (turn,) = answers.turns
        sample = turn.sample
        stop = next((stop for stop in self._stops if sample.finish_reason == "stop" and stop in sample.text), None)
        reason = "max_tokens" if sample.is_truncated else "tool_use" if turn.message.tool_calls else "end_turn"
        return {
            **self._head,
            "content": list(_write_content(turn.message)),
            "stop_reason": reason if stop is None else "stop_sequence",
            "stop_sequence": stop,
            "usage": {"input_tokens": answers.num_prompt_tokens, "output_tokens": len(sample.token_ids)},
        }

    def begin(self, num_prompt_tokens: int) -> Iterator[Event]:
        """Yield the first events of a streamed response."""
        usage = {"input_tokens": num_prompt_tokens, "output_tokens": 0}
        empty: JsonObject = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message={**self._head, **empty})

    def end(self, answers: Answers) -> Iterator[Event]:
        """Yield the last events of a streamed response."""
        whole, (turn,) = self.write(answers), answers.turns
        yield from self.add(0, turn.message.reasoning or "", turn.message.content)
        yield from self._switch(None)
        for block in whole["content"]:
            if block["type"] == "tool_use":
                yield self._start({**block, "input": {}})
                yield self._delta({"type": "input_json_delta", "partial_json": json.dumps(block["input"])})
                yield from self._end_block("call", "")
                self._num_blocks += 1
        ends = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        yield _event("message_delta", delta=ends, usage={"output_tokens": whole["usage"]["output_tokens"]})
        yield _event("message_stop")

    def _begin_block(self, kind: str) -> Iterator[Event]:
        is_thought = kind == "reasoning"
        yield self._start({"type": "thinking", "thinking": "", "signature": ""} if is_thought else EMPTY_TEXT)

    def _extend_block(self, kind: str, text: str) -> Iterator[Event]:
        name = "thinking" if kind == "reasoning" else "text"
        yield self._delta({"type": f"{name}_delta", name: text})

    def _end_block(self, kind: str, text: str) -> Iterator[Event]:
        yield _event("content_block_stop", index=self._num_blocks)

    def _start(self, block: JsonObject) -> Event:
        return _event("content_block_start", index=self._num_blocks, content_block=block)

    def _delta(self, delta: JsonObject) -> Event:
        return _event("content_block_delta", index=self._num_blocks, delta=delta)
