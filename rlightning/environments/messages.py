"""Chat messages, as environments and the policy exchange them."""

from __future__ import annotations

from typing import Any, NamedTuple

from rlightning.python_values import JsonObject

Fields = list[Any]
"""The fields of a record in plain types, for a checkpoint or another process."""
Message = JsonObject
"""A message of chat APIs, such as ``{"role": "user", "content": "..."}``."""


class ToolCall(NamedTuple):
    """A tool call of the policy; its result refers to the id. ``arguments`` is a JSON object as text."""

    id: str
    name: str
    arguments: str


class AssistantMessage(NamedTuple):
    """One turn of the policy, parsed to a message.

    Attributes:
        content: the text without reasoning and tool calls.
        reasoning: None if there is none.
        tool_calls: the valid calls, in their order.
        errors: a message to the policy for each malformed call.
        error_places: for each error the number of valid calls before it; () if all errors come after the valid calls.
    """

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()
    error_places: tuple[int, ...] = ()

    def to_message(self) -> Message:
        """Return the message as a dictionary of chat APIs, without an empty ``reasoning_content`` or ``tool_calls``."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message
