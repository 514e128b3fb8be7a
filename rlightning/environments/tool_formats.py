"""The formats in which model families write tool calls and reasoning, and their parsers.

This module parses formats with JSON arguments: those of Hermes (Qwen2.5, Qwen3 and others), Llama 3, Mistral, DeepSeek
and gpt-oss. The package ``renderers`` parses those with their own grammar. vLLM's parsers are not used: importing them
changes torch's compiler settings and the environment variables of the trainer's process.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlightning.environments.messages import AssistantMessage, Message, ToolCall
from rlightning.errors import ConfigError
from rlightning.foreign_text import cut_line

if TYPE_CHECKING:
    from renderers import ParsedResponse
    from transformers import PreTrainedTokenizerBase as Tokenizer

OPEN_THOUGHT, CLOSE_THOUGHT = "<think>", "</think>"
MAX_CALLS = 32
"""Maximum number of tool calls that are parsed in a turn; further ones together are one error."""
MAX_QUOTED = 200
"""Maximum characters of a malformed tool call that an error message quotes."""


@dataclass(frozen=True)
class Family:
    """A group of models that write tool calls in the same format.

    Attributes:
        markers: strings that every chat template of the family contains.
        renderers: parsers of the package ``renderers``, of which the first that supports the tokenizer is used; () if
            this module parses the format.
        call_start: text with which calls begin; None if a turn can be parsed only when it is whole.
        find_calls: yields the calls in a text without reasoning; None if the package or the channels provide them.
        has_channels: whether each part of a turn is a message with a header (:func:`split_channels`).
    """

    name: str
    markers: tuple[str, ...]
    renderers: tuple[str, ...] = ()
    call_start: re.Pattern[str] | None = None
    find_calls: "Callable[[str], Iterator[FoundCall]] | None" = None
    has_channels: bool = False
    example: str = ""


@dataclass(frozen=True)
class FoundCall:
    """A tool call in a text, and the position at which it starts.

    Attributes:
        text: the call's JSON as the policy wrote it.
        is_closed: whether the call is complete.
        name: name of the tool, if the JSON does not contain it.
    """

    start: int
    text: str
    is_closed: bool = True
    name: str | None = None


class ToolCallError(ValueError):
    """A tool call cannot be parsed; the message is for the policy."""


def find_hermes_calls(text: str) -> Iterator[FoundCall]:
    """Yield the tool calls that a text contains in the form ``<tool_call>{...}</tool_call>``."""
    for found in re.finditer(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", text, re.DOTALL):
        yield FoundCall(found.start(), found[1].strip(), bool(found[2]))


def find_llama_calls(text: str) -> Iterator[FoundCall]:
    """Yield the calls of a turn that is JSON: ``{"name": ..., "parameters": {...}}``, or several with semicolons."""
    begins = re.match(r'\s*(<\|python_tag\|>\s*|(?=\{\s*"(name|type|function|parameters)"\s*:))', text)
    if begins is None:
        return
    place = begins.end()
    while place < len(text):
        try:
            _, end = json.JSONDecoder().raw_decode(text, place)
        except (ValueError, RecursionError):
            yield FoundCall(0, text[place:].strip())
            return
        yield FoundCall(0, text[place:end])
        place = end + len(text[end:]) - len(text[end:].lstrip(" \n;"))


def find_mistral_calls(text: str) -> Iterator[FoundCall]:
    """Yield the calls ``[TOOL_CALLS][{...}, ...]``, or of newer models ``[TOOL_CALLS]name[CALL_ID]...[ARGS]{...}``."""
    for found in re.finditer(r"\[TOOL_CALLS\]\s*(.*?)\s*(?=\[TOOL_CALLS\]|\Z)", text, re.DOTALL):
        head, separator, arguments = found[1].partition("[ARGS]")
        if separator:
            yield FoundCall(found.start(), arguments.strip(), name=head.partition("[CALL_ID]")[0].strip())
            continue
        try:
            calls = json.loads(found[1])
        except (ValueError, RecursionError):
            calls = None
        if isinstance(calls, list):
            yield from (FoundCall(found.start(), json.dumps(call)) for call in calls)
        else:
            yield FoundCall(found.start(), found[1])


DEEPSEEK_CALLS, DEEPSEEK_CALL, DEEPSEEK_ARGUMENTS, DEEPSEEK_END = (
    f"<｜tool▁{name}｜>"  # noqa: RUF001
    for name in ("calls▁begin", "call▁begin", "sep", "call▁end")
)


def find_deepseek_calls(text: str) -> Iterator[FoundCall]:
    """Yield the calls of DeepSeek V3.1 (a name and JSON) or V3 (``function``, a name, and JSON in a code block)."""
    place = text.find(DEEPSEEK_CALLS)
    end = rf"({DEEPSEEK_END}|(?={DEEPSEEK_CALL})|\Z)"
    for found in re.finditer(rf"{DEEPSEEK_CALL}(.*?){DEEPSEEK_ARGUMENTS}(.*?){end}", text, re.DOTALL):
        block = re.fullmatch(r"\s*(\S*)\s*```json\s*(.*?)\s*(?:```)?\s*", found[2], re.DOTALL)
        name, arguments = (found[1], found[2]) if block is None else (block[1], block[2])
        yield FoundCall(place, arguments.strip(), bool(found[3]), name.strip())


CHANNEL = re.compile(
    r"(?:<\|start\|>assistant)?((?:(?!<\|start\|>).)*?)<\|message\|>(.*?)"
    r"(<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
"""Pattern of a message of gpt-oss: header, text and end. The first header begins in the prompt."""


def split_channels(text: str) -> tuple[str | None, str, str, list[FoundCall]]:
    """Split a gpt-oss turn, a series of messages with headers. Return its reasoning (None without any), its content,
    the content together with the calls as written, and the calls.

    The header of a call names its tool (``to=functions.add``), any other header its channel.
    """
    messages = list(CHANNEL.finditer(text))
    if not messages and "<|channel|>" not in text:
        messages = list(CHANNEL.finditer(f"<|channel|>final<|message|>{text}"))
    thoughts: list[str] = []
    said: list[str] = []
    written: list[str] = []
    calls: list[FoundCall] = []
    for message in messages:
        header, body, end = message.groups()
        recipient = re.search(r"\bto=([^\s<]+)", header)
        if recipient is not None:
            calls.append(FoundCall(0, body.strip(), bool(end), recipient[1].removeprefix("functions.")))
            written.append(message[0])
        elif "analysis" in header:
            thoughts.append(body)
        else:
            said.append(body)
            written.append(body)
    return "\n".join(thoughts) if thoughts else None, "\n".join(said), "\n".join(written), calls


KIMI_CALLS = "<|tool_calls_section_begin|>"
HERMES = Family(
    "Hermes",
    ("<tool_call>",),
    call_start=re.compile("<tool_call>"),
    find_calls=find_hermes_calls,
    example='<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>',
)
FAMILIES = (
    Family(
        "gpt-oss",
        ("<|channel|>", "<|message|>"),
        has_channels=True,
        example="<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>",
    ),
    Family("Gemma 4", ("<|tool_call>",), ("gemma4",)),
    Family("GLM 4.5", ("<arg_key>", "<tool_call>"), ("glm-4.5",), re.compile("<tool_call>")),
    Family("MiniMax M2", ("<minimax:tool_call>",), ("minimax-m2",), re.compile("<minimax:tool_call>")),
    Family("Qwen3-Coder", ("<function=", "<parameter="), ("qwen3.5", "nemotron-3"), re.compile("<tool_call>")),
    Family(
        "DeepSeek V3",
        (DEEPSEEK_CALLS,),
        call_start=re.compile(DEEPSEEK_CALLS),
        find_calls=find_deepseek_calls,
        example=f"{DEEPSEEK_CALLS}{DEEPSEEK_CALL}name{DEEPSEEK_ARGUMENTS}{{...}}{DEEPSEEK_END}",
    ),
    Family("Kimi K2", (KIMI_CALLS,), ("kimi-k2",), re.compile(re.escape(KIMI_CALLS))),
    HERMES,
    Family(
        "Mistral",
        ("[TOOL_CALLS]",),
        call_start=re.compile(r"\[TOOL_CALLS\]"),
        find_calls=find_mistral_calls,
        example='[TOOL_CALLS][{"name": "...", "arguments": {...}}]',
    ),
    Family(
        "Llama 3",
        ("<|start_header_id|>", '"parameters"'),
        call_start=re.compile(r"\A\s*(\{|<\|python_tag\|>)"),
        find_calls=find_llama_calls,
        example='{"name": "...", "parameters": {...}}',
    ),
)
"""Families of tool formats; a chat template has the format of the first family whose markers it contains."""


def find_family(chat_template: str) -> Family | None:
    """Return the family whose tool format a chat template uses; None for an unknown format."""
    return next((f for f in FAMILIES if all(marker in chat_template for marker in f.markers)), None)


def read_message(
    text: str, family: Family | None, call_ids: Iterator[str], *, in_thought: bool, has_tools: bool
) -> AssistantMessage:
    """Parse the text of a turn to a message.

    Args:
        text: the turn's text without its end token, or with it in formats with channels.
        family: format of the calls; None if there are none.
        in_thought: whether the text begins inside the reasoning.
        has_tools: whether calls are parsed; otherwise they stay text.
    """
    if family is not None and family.has_channels:
        reasoning, content, text, found = split_channels(text)
    else:
        reasoning, rest = split_thought(text, in_thought=in_thought)
        text = rest or ""
        found = list(family.find_calls(text)) if has_tools and family is not None and family.find_calls else []
        content = text[: found[0].start].rstrip() if found else text
    if family is None or not (found and has_tools):
        return AssistantMessage(text, reasoning)
    read: list[ToolCall | str] = []
    for one in found[:MAX_CALLS]:
        try:
            name, arguments = read_call(one)
        except ToolCallError as error:
            read.append(f"{error} It began: {one.text[:MAX_QUOTED]}\nWrite calls as {family.example}")
        else:
            read.append(ToolCall(next(call_ids), name, arguments))
    return make_message(content, reasoning, read, len(found))


def make_message(
    content: str, reasoning: str | None, read: Sequence[ToolCall | str], num_written: int
) -> AssistantMessage:
    """Return a turn's message with its calls, and the errors (texts for the policy) in place of malformed ones.

    ``num_written`` is the number of calls in the turn; those beyond ``MAX_CALLS`` become one error.
    """
    if num_written > MAX_CALLS:
        read = [*read, f"A turn has at most {MAX_CALLS} tool calls: {num_written - MAX_CALLS} more were not made."]
    errors = {place: one for place, one in enumerate(read) if isinstance(one, str)}
    calls = tuple(one for one in read if isinstance(one, ToolCall))
    places = tuple(place - number for number, place in enumerate(errors))
    return AssistantMessage(content, reasoning, calls, tuple(errors.values()), places)


def split_thought(text: str, *, in_thought: bool) -> tuple[str | None, str | None]:
    """Split a text, which may begin inside the reasoning, into reasoning and content.

    Reasoning is None if there is none; content is None if the reasoning does not end.
    """
    body = text.lstrip()
    if not (in_thought or body.startswith(OPEN_THOUGHT)):
        return None, text
    thought, end, rest = body.removeprefix(OPEN_THOUGHT).partition(CLOSE_THOUGHT)
    return thought.strip("\n"), rest.lstrip("\n") if end else None


def read_call(found: FoundCall) -> tuple[str, str]:
    """Parse a tool call to its name, and its arguments as JSON; raises a ToolCallError if it is malformed."""
    if not found.is_closed:
        raise ToolCallError("A tool call has no end.")
    call = load_json(found.text)
    if found.name is not None:
        call = {"name": found.name, "arguments": call}
    if not isinstance(call, dict):
        raise ToolCallError("A tool call is no JSON object.")
    name = call.get("name")
    if not isinstance(name, str) or not name:
        raise ToolCallError('A tool call has no "name".')
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = load_json(arguments)
    if not isinstance(arguments, dict):
        raise ToolCallError(f'The "arguments" of the call of {name} are no JSON object.')
    return name, dump_arguments(arguments)


def load_json(text: str) -> object:
    """Parse JSON that the policy wrote; raises a ToolCallError if it is malformed."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ToolCallError("A tool call has half of a surrogate pair.") from None
    except (ValueError, RecursionError) as error:
        raise ToolCallError(f"A tool call is no JSON ({error}).") from None
    return value


def dump_arguments(arguments: Mapping[str, object]) -> str:
    """Return a tool call's arguments as a JSON text, with non-ASCII characters unescaped."""
    return json.dumps(dict(arguments), ensure_ascii=False)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON's")


class RenderersParser:
    """Parses sampled tokens with a parser of the package ``renderers``, which may be missing.

    The parser gets the chat template's arguments that it supports. Raises a ConfigError if it rejects the tokenizer.
    """

    def __init__(self, tokenizer: "Tokenizer", family: Family, arguments: Mapping[str, object]) -> None:
        from renderers import config_from_name, create_renderer

        self._tokenizer, self._call_start = tokenizer, family.call_start
        for name in family.renderers:
            try:
                config = config_from_name(name)
                known = {key: value for key, value in arguments.items() if key in type(config).model_fields}
                self._renderer = create_renderer(tokenizer, config.model_copy(update=known))
            except Exception as error:  # renderers check tokenizers by assertions
                reason = cut_line(error)
            else:
                return
        raise ConfigError(reason)

    def parse(
        self,
        token_ids: Sequence[int],
        tools: Sequence[Message] | None,
        prompt_ids: Sequence[int],
        call_ids: Iterator[str],
    ) -> AssistantMessage:
        """Parse the sampled tokens of a turn to a message."""
        parsed = self._renderer.parse_response(
            list(token_ids),
            tools=[tool.get("function", tool) for tool in tools] if tools else None,
            prompt_ids=list(prompt_ids),
        )
        if not tools and parsed.tool_calls:
            return AssistantMessage(self._with_calls(parsed, token_ids), parsed.reasoning_content or None)
        read: list[ToolCall | str] = []
        for call in parsed.tool_calls[:MAX_CALLS]:
            if call.name and isinstance(call.arguments, dict) and call.status in ("ok", "unknown_tool"):
                read.append(ToolCall(call.id or next(call_ids), call.name, dump_arguments(call.arguments)))
            else:
                kind = str(call.status).replace("_", " ")
                read.append(f"A tool call cannot be read ({kind}). It began: {call.raw[:MAX_QUOTED]}")
        return make_message(parsed.content, parsed.reasoning_content or None, read, len(parsed.tool_calls))

    def _with_calls(self, parsed: "ParsedResponse", token_ids: Sequence[int]) -> str:
        """Return the message with its tool calls as text, if there are no tools or the calls are malformed."""
        text = str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))
        text = text.removesuffix(self._tokenizer.eos_token or "")
        calls = None if self._call_start is None else self._call_start.search(text)
        return str(parsed.content or "") + (
            "".join(call.raw for call in parsed.tool_calls) if calls is None else text[calls.start() :]
        )
