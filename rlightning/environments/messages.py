"""Chat messages, as environments and the policy exchange them."""

from __future__ import annotations

from typing import Any, NamedTuple

from rlightning.python_values import JsonObject

Fields = list[Any]
"""A record's fields in plain types, in which it is saved, or sent to another process."""
Message = JsonObject
"""A message of chat APIs, such as ``{"role": "user", "content": "..."}``."""


class ToolCall(NamedTuple):
    """A tool call that the policy wrote; its answer refers to the id, and the arguments are JSON of an object."""

    id: str
    name: str
    arguments: str


class AssistantMessage(NamedTuple):
    """The message that the tokens of one turn of the policy's encode.

    Attributes:
        content: the text without reasoning and tool calls.
        reasoning: None where it has none.
        tool_calls: those that could be read, in their order.
        errors: what is wrong with each of the others, in words for the policy.
        error_places: of each error, how many of the calls are before it; (): all.
    """

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()
    error_places: tuple[int, ...] = ()

    def to_message(self) -> Message:
        """Return the message as a dictionary of chat APIs, without empty ``reasoning_content`` and ``tool_calls``."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message
