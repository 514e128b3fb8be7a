"""Chat messages of prompt sets: validated, without null fields, and rendered by the tokenizer's chat template."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlightning.errors import ConfigError, did_you_mean
from rlightning.foreign_text import cut_line, cut_value
from rlightning.python_values import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

Message = dict[str, Any]
"""A chat message: a role, and other fields that the chat template reads."""
ROLES = ("system", "user", "assistant", "tool")
"""Roles that chat templates render, or refuse. Many render nothing for other roles."""
CONTINUES = "continue_final_message"
"""Key of ``chat_template_arguments`` with which a final assistant message is the beginning of the completion."""
_PROBE = "THE CONTENT OF THE MESSAGE"
_PASSED_ON = {CONTINUES, "chat_template"}
"""Parameters of ``apply_chat_template`` that a user may set; others are set here, or are variables of the template."""
_OPEN_THOUGHT = re.compile(
    r"[<\[](?!/|\|?end)[^<>\[\]\s]*(?:think|thought|reason)[^<>\[\]\s]*[>\]]\s*\Z", re.IGNORECASE
)


def check_template_arguments(tokenizer: "Tokenizer", arguments: JsonObject) -> None:
    """Raise a ConfigError for an argument that the tokenizer's chat template does not read."""
    if not arguments:
        return
    template = tokenizer.get_chat_template(arguments.get("chat_template"), arguments.get("tools"))
    code = " ".join(re.findall(r"\{[{%](.*?)[}%]\}", template, re.DOTALL))
    names = set(re.findall(r"[A-Za-z_]\w*", code))
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters.keys() - {"tools", "documents"}
    for key in arguments:
        if key in _PASSED_ON:
            continue
        if key in parameters or key == "messages":
            raise ConfigError(f"chat_template_arguments: '{key}' is set by the data module. Remove it.")
        if key not in names:
            way_out = did_you_mean(key, names, otherwise="Remove it.")
            raise ConfigError(f"chat_template_arguments: the chat template does not read '{key}'. {way_out}")


def is_chat(content: object) -> bool:
    """Return whether a cell is a list of messages, each with a role."""
    messages = content if isinstance(content, list) else []
    return bool(messages) and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages)


def clean_messages(messages: list[Message], where: str, *, has_fixed_fields: bool) -> list[Message]:
    """Return messages as chat templates expect them: without null fields, and with a text as each content.

    Templates test whether a field exists, not whether it is null. Text parts are joined by a line break, as in vLLM.
    ``has_fixed_fields`` is for file formats with every field in every row (Parquet, ``datasets``): nulls in the
    arguments of tool calls are then left out too.
    """
    return [_clean(message, f"{where}: message {i}", has_fixed_fields) for i, message in enumerate(messages, 1)]


def render_chat(tokenizer: "Tokenizer", messages: list[Message], arguments: JsonObject, where: str) -> str:
    """Return a chat as text, by the tokenizer's chat template, up to the point at which the model continues.

    Raises a ConfigError if the template rejects the messages, or they end with the assistant's without ``CONTINUES``.
    """
    ends_with_model = messages[-1]["role"] == "assistant"
    if ends_with_model and not arguments.get(CONTINUES):
        raise ConfigError(
            f"{where}: the chat ends with the assistant, so that nothing is left to answer. Remove that message, or "
            f"set chat_template_arguments={{{CONTINUES}: true}} to have completions continue it."
        )
    options = {**arguments, CONTINUES: ends_with_model, "add_generation_prompt": not ends_with_model}

    def render(chat: list[Message]) -> str:
        return apply_template(tokenizer, chat, f"{where}: the tokenizer's chat template refuses it", options)

    check_roles(messages, render, where)
    return render(messages)


def apply_template(
    tokenizer: "Tokenizer", messages: list[Message], refusal: str, arguments: Mapping[str, Any], **options: Any
) -> str:
    """Return a chat as text, by the tokenizer's chat template.

    Args:
        messages: the chat.
        refusal: beginning of the ConfigError that is raised if the template rejects the messages.
        arguments: the user's arguments of ``apply_chat_template``.
        options: further arguments of it.
    """
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options, **arguments))
    except Exception as error:  # a template is a program by the model's author, and may raise any exception
        kind = "" if type(error).__name__ == "TemplateError" else f"{type(error).__name__}: "
        reason = f"{kind}{cut_line(error)}".rstrip(".")
        raise ConfigError(f"{refusal}: {reason}. Correct the messages.") from error


def check_roles(messages: Sequence[Message], render: Callable[[list[Message]], str], where: str) -> None:
    """Raise a ConfigError if a message has a role for which the chat template renders nothing, such as "function"."""
    for place, message in enumerate(messages):
        role = message.get("role")
        if role in ROLES:
            continue
        probe = [*messages[:place], {**message, "content": _PROBE}, *messages[place + 1 :]]
        if _PROBE not in render(probe):
            raise ConfigError(
                f"{where}: the chat template leaves out messages of the role '{role}'. Use one of {', '.join(ROLES)}."
            )


def find_open_thought(text: str) -> str | None:
    """Return the tag at the end of a prompt that opens the model's reasoning, such as ``<think>``; None without one."""
    found = _OPEN_THOUGHT.search(text[-100:])
    return found.group().strip() if found else None


def _clean(message: Message, where: str, has_fixed_fields: bool) -> Message:
    kept = _without_nulls(message, has_fixed_fields)
    calls = kept.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise ConfigError(f"{where} has tool_calls={cut_value(calls)}. Write a list of tool calls, or leave them out.")
    if calls == []:
        del kept["tool_calls"]
    return {**kept, "content": _read_text(kept, where)}


def _without_nulls(fields: Message, has_fixed_fields: bool) -> Message:
    def clean(value: object) -> object:
        if isinstance(value, list):
            return [clean(item) for item in value]
        return _without_nulls(value, has_fixed_fields) if isinstance(value, dict) else value

    return {
        name: item if name == "arguments" and not has_fixed_fields else clean(item)
        for name, item in fields.items()
        if item is not None
    }


def _read_text(message: Message, where: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if message.get("tool_calls") or message.get("function_call"):
            return ""
        raise ConfigError(f"{where} ('{message['role']}') has no content. Write a text, or remove the message.")
    if isinstance(content, list):
        return "\n".join(_read_part(part, f"{where}, part {i}") for i, part in enumerate(content, 1))
    raise ConfigError(f"{where} has content={cut_value(content)}. Write a text, or a list of text parts.")


def _read_part(part: object, where: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
    if not isinstance(text, str):
        raise ConfigError(f"{where} is {cut_value(part)}. Only text is read: {{type: text, text: ...}}.")
    return text
