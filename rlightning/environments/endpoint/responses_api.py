"""The route ``/v1/responses`` of OpenAI's API, converted to and from chats."""

import secrets
import time
from collections.abc import Iterator, Mapping
from itertools import count

from rlightning.environments.endpoint.errors import APIError, reading
from rlightning.environments.endpoint.openai_api import count_usage, read_tools
from rlightning.environments.endpoint.parameters import (
    RESPONSE_FORMAT,
    log_left_to_template,
    read_parameters,
    refuse_choices,
    way_out,
)
from rlightning.environments.endpoint.session import Session, ToolUse
from rlightning.environments.endpoint.streaming import Answers, BlockWriter, Emit, Event, Reply, TurnStream, answer
from rlightning.environments.messages import Message
from rlightning.foreign_text import cut_value
from rlightning.python_values import JsonObject

OWN = ("input", "instructions", "text", "tools", "tool_choice", "previous_response_id")
NAMES = {"max_output_tokens": "max_tokens"}


async def respond(session: Session, body: JsonObject, emit: Emit) -> Reply:
    """Return the policy's next turn as the response to ``/v1/responses``, OpenAI's newer API; None if it was streamed.

    ``emit`` gets the events of a stream. Raises an APIError for an invalid request.
    """
    renamed = {NAMES.get(name, name): value for name, value in body.items()}
    refuse_choices(body)
    if body.get("text") and "text" not in session.ignored:
        renamed |= _read_format(body["text"])
    asked = read_parameters(
        renamed, session.policy.sampling, ignored=session.ignored, allowed=session.allowed, others=OWN
    )
    with reading("input"):
        messages = [*_read_earlier(session, body), *_read_input(body.get("input"))]
    with reading("tools"):
        tools = _read_tools(body, session.ignored)
    instructions = body.get("instructions")
    head = [{"role": "system", "content": instructions}] if instructions else []
    writer = ResponseWriter(body, session.model)

    async def sample(stream: TurnStream | None) -> Answers:
        answers = await session.chat(asked, head + messages, tools, stream)
        session.responses[writer.ids["resp"]] = [*messages, answers.turns[0].message.to_message()]
        return answers

    return await answer(writer, emit if asked.stream else None, sample)


def _read_format(text: object) -> JsonObject:
    """Convert the parameter ``text`` to the parameter ``response_format`` of chat completions. Like all settings of how
    much a model says, ``text.verbosity`` has no effect.
    """
    if not isinstance(text, Mapping) or set(text) - {"format", "verbosity"}:
        raise APIError(
            f"text={cut_value(text)} is not supported, other than text.format. {way_out('text')}", param="text"
        )
    if "verbosity" in text:
        log_left_to_template("text.verbosity")
    given = text.get("format") or {"type": "text"}
    if not isinstance(given, Mapping):
        raise APIError(f"text.format={cut_value(given)} has to be an object.", param="text")
    schema = {"json_schema": dict(given)} if given.get("type") == "json_schema" else {}
    return {RESPONSE_FORMAT: {"type": given.get("type"), **schema}}


def _read_earlier(session: Session, body: JsonObject) -> list[Message]:
    earlier = body.get("previous_response_id")
    if earlier is not None and earlier not in session.responses:
        raise APIError(f"previous_response_id={cut_value(earlier)} is none of this session's.", 404)
    return session.responses.get(str(earlier), [])


def _read_input(given: object) -> list[Message]:
    """Return the messages of the chat; items that the policy wrote in one turn are merged into one message."""
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
            if not messages or _begins_turn(kind, messages[-1]):
                messages.append({"role": "assistant", "content": None})
            _add_item(messages[-1], kind, item)
        else:
            raise APIError(f"input: items of type '{kind}' are not supported.", param="input")
    return messages


def _begins_turn(kind: str, last: Message) -> bool:
    """Return whether an item of the assistant's is not of the same turn as the message before it.

    In a turn the reasoning comes first, and there is one text.
    """
    if last["role"] != "assistant" or kind == "reasoning":
        return True
    return kind == "message" and (last["content"] is not None or "tool_calls" in last)


def _add_item(message: Message, kind: str, item: JsonObject) -> None:
    if kind == "message":
        message["content"] = item.get("content")
    elif kind == "reasoning":
        message["reasoning_content"] = "\n".join(str(part.get("text")) for part in item.get("content") or [])
    else:
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)


def _read_tools(body: JsonObject, ignored: frozenset[str]) -> ToolUse:
    tools = body.get("tools") or []
    for tool in tools:
        if tool.get("type") != "function":
            raise APIError(f"tools: tools of type '{tool.get('type')}' are not supported.", param="tools")
    names = ("name", "description", "parameters")
    functions = [{"type": "function", "function": {name: tool.get(name) for name in names}} for tool in tools]
    return read_tools({"tools": functions, "tool_choice": body.get("tool_choice")}, ignored)


class ResponseWriter(BlockWriter):
    """Formats a turn as a response of OpenAI's Responses API, whole or as stream events; tool calls are sent whole.

    ``ids`` are the ids of the response ("resp") and its parts.
    """

    def __init__(self, body: JsonObject, model: str) -> None:
        super().__init__()
        self.ids = {kind: _make_id(kind) for kind in ("resp", "rs", "msg")}
        self._numbers = count()
        self._head = {
            "id": self.ids["resp"],
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "instructions": body.get("instructions"),
            "tools": body.get("tools") or [],
            "tool_choice": body.get("tool_choice") or "auto",
            "parallel_tool_calls": True,
            "previous_response_id": body.get("previous_response_id"),
            "metadata": body.get("metadata") or {},
            "temperature": body.get("temperature"),
            "top_p": body.get("top_p"),
        }

    def write(self, answers: Answers) -> JsonObject:
        """Return the whole response in the form of OpenAI's Responses API."""
        (turn,) = answers.turns
        message, is_cut, usage = turn.message, turn.sample.is_truncated, count_usage(answers)
        status = "incomplete" if is_cut else "completed"
        output: list[JsonObject] = []
        if message.reasoning:
            output.append(self._item("reasoning", message.reasoning, status))
        if message.content or not message.tool_calls:
            output.append(self._item("content", message.content, status))
        for call in message.tool_calls:
            named = {"call_id": call.id, "name": call.name, "arguments": call.arguments, "status": status}
            output.append({"id": _make_id("fc"), "type": "function_call", **named})
        return {
            **self._head,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": output,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    def begin(self, num_prompt_tokens: int) -> Iterator[Event]:
        """Yield the first events of a streamed response."""
        begun: JsonObject = {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        yield self._event("response.created", response={**self._head, **begun})

    def end(self, answers: Answers) -> Iterator[Event]:
        """Yield the last events of a streamed response."""
        response, (turn,) = self.write(answers), answers.turns
        yield from self.add(0, turn.message.reasoning or "", turn.message.content)
        if not turn.message.content and not turn.message.tool_calls:
            yield from self._switch("content")
        yield from self._switch(None)
        for item in response["output"]:
            if item["type"] == "function_call":
                yield from self._write_call(item)
                self._num_blocks += 1
        yield self._event(f"response.{response['status']}", response=response)

    def _write_call(self, item: JsonObject) -> Iterator[Event]:
        place, arguments = {"output_index": self._num_blocks, "item_id": item["id"]}, item["arguments"]
        yield self._place_item("added", {**item, "arguments": "", "status": "in_progress"})
        yield self._event("response.function_call_arguments.delta", **place, delta=arguments)
        yield self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=arguments)
        yield self._place_item("done", item)

    def _begin_block(self, kind: str) -> Iterator[Event]:
        yield self._place_item("added", {**self._item(kind, "", "in_progress"), "content": []})
        yield self._event("response.content_part.added", **self._place(kind), part=_part(kind, ""))

    def _extend_block(self, kind: str, text: str) -> Iterator[Event]:
        yield self._text_event(kind, "delta", delta=text)

    def _end_block(self, kind: str, text: str) -> Iterator[Event]:
        yield self._text_event(kind, "done", text=text)
        yield self._event("response.content_part.done", **self._place(kind), part=_part(kind, text))
        yield self._place_item("done", self._item(kind, text, "completed"))

    def _item(self, kind: str, text: str, status: str) -> JsonObject:
        content = [_part(kind, text)]
        if kind == "reasoning":
            return {"id": self.ids["rs"], "type": "reasoning", "summary": [], "content": content, "status": status}
        return {"id": self.ids["msg"], "type": "message", "role": "assistant", "content": content, "status": status}

    def _event(self, kind: str, **fields: object) -> Event:
        return kind, {"type": kind, "sequence_number": next(self._numbers), **fields}

    def _place(self, kind: str) -> JsonObject:
        item = self.ids["rs" if kind == "reasoning" else "msg"]
        return {"output_index": self._num_blocks, "item_id": item, "content_index": 0}

    def _place_item(self, what: str, item: JsonObject) -> Event:
        return self._event(f"response.output_item.{what}", output_index=self._num_blocks, item=item)

    def _text_event(self, kind: str, what: str, **text: str) -> Event:
        extra: JsonObject = {} if kind == "reasoning" else {"logprobs": []}
        name = "reasoning_text" if kind == "reasoning" else "output_text"
        return self._event(f"response.{name}.{what}", **self._place(kind), **text, **extra)


def _part(kind: str, text: str) -> JsonObject:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _make_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
