"""Converts chats to tokens by the tokenizer's chat template, and sampled tokens back to messages.

A conversation is rendered once, at its start. Later turns of the policy keep their sampled tokens; only the messages
after them are rendered, in the template's format for that position.
"""

import json
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import product, takewhile
from typing import TYPE_CHECKING, Any

from rlightning.data.chats import CONTINUES, apply_template, check_roles, clean_messages
from rlightning.data.formatting import USUAL, PromptFormat, prompt_messages
from rlightning.environments.messages import AssistantMessage, Message
from rlightning.environments.partial_message import PartialMessage, TokenText
from rlightning.environments.tool_formats import (
    CLOSE_THOUGHT,
    DEEPSEEK_ARGUMENTS,
    DEEPSEEK_CALL,
    DEEPSEEK_CALLS,
    DEEPSEEK_END,
    MAX_CALLS,
    OPEN_THOUGHT,
    Family,
    RenderersParser,
    find_family,
    read_message,
)
from rlightning.errors import ConfigError
from rlightning.foreign_text import cut_line
from rlightning.types.trajectory import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

_MARK = "ANSWER OF THE POLICY"
"""Placeholder for the policy's text, by which the text that a chat template adds after it is found."""
_PLAIN: tuple[Message, ...] = ({"role": "user", "content": ""}, {"role": "assistant", "content": _MARK})
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Field names of the reasoning in messages."""
_KEEPS_REASONING = {"clear_thinking": False, "preserve_thinking": True}
"""Arguments by which the templates of GLM and of Qwen3.6 keep the reasoning of earlier turns."""
MAX_BEGINNINGS = 256
"""Number of conversations whose tokens are cached: a group's trajectories have the same beginning at about one time."""
INSTALL = "pip install --no-deps renderers prime-pydantic-config"
"""Command that installs renderers; its dependency openai-harmony would overwrite files of vLLM's oss-harmony."""
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
"""An example of a tool definition, with which chat templates are rendered to find their format of tool calls."""


class ChatFormat:
    """Converts between a policy's tokens and chats. Without a chat template, message contents are concatenated.

    Args:
        template_arguments: arguments of the chat template, such as ``{"enable_thinking": False}``; None for those of
            the prompts.
        prompt_format: converts rows to prompts.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        template_arguments: Mapping[str, Any] | None = None,
        *,
        prompt_format: PromptFormat = USUAL,
    ) -> None:
        self.tokenizer, self._prompt_format = tokenizer, prompt_format
        chosen = prompt_format.chat_template_arguments if template_arguments is None else template_arguments
        self._arguments = {name: value for name, value in chosen.items() if name != CONTINUES}

    def prompt_messages(self, prompt: Prompt) -> list[Message]:
        """Return the messages of a prompt; raises a ConfigError if the chat template was already applied to it."""
        where = f"Prompt {prompt.index}"
        messages = prompt_messages(prompt.columns, self._prompt_format, where)
        if any(self._special_text.match(message["content"]) for message in messages):
            raise ConfigError(
                f"{where} begins with a special token, as if it were rendered already. Tools are described in what the "
                "chat template renders: give texts or messages."
            )
        return messages

    @cached_property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return self.tokenizer.chat_template is not None or "chat_template" in self._arguments

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, with special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def render(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> list[int]:
        """Return the tokens of a conversation, with the beginning of the policy's turn.

        Raises a ConfigError if the template refuses the conversation, or it has contents other than text.
        """
        text = self.render_text(messages, tools)
        return self._encode(text, add_special_tokens=not self.has_template)

    @cached_property
    def render_json(self) -> "Callable[[str], array[int]]":
        """:meth:`render` of a conversation and its tools as JSON, with a cache that a group's trajectories share."""
        return lru_cache(MAX_BEGINNINGS)(lambda conversation: array("q", self.render(*json.loads(conversation))))

    def render_text(
        self, messages: Sequence[Message], tools: Sequence[Message] | None = None, add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a conversation, with the beginning of the policy's turn if ``add_generation_prompt``."""
        cleaned = self._clean(messages)
        if not self.has_template:
            if tools:
                self.check_tools()
            return "".join(message["content"] for message in cleaned)
        return self._apply(cleaned, tools, add_generation_prompt)

    def render_observations(self, messages: Sequence[Message], *, sampled: Sequence[int], ended: bool) -> list[int]:
        """Return the token ids between two turns of the policy: one's end, ``messages``, and the next one's beginning.

        Args:
            messages: the messages after the turn; results of tools have the ``name`` of their tool, and come first.
            sampled: tokens of the policy's turn.
            ended: whether the turn contains its end token. If a limit or a stop string cut it before, the token is
                added.
        """
        cleaned = self._clean(messages)
        if not self.has_template:
            return self._encode("".join(message["content"] for message in cleaned))
        close, text = self._find_turn_close(cleaned)
        if ended and sampled and sampled[-1] in self._hidden_ids and close is not None:
            last = self._name_token(sampled[-1])
            is_known = last in close and text.startswith(close)
            end = close.find(last) + len(last) if is_known else self._end_of_special(text)
            return self._encode(text[end:])
        token_ids = self._encode(text)
        is_repeated = ended and bool(sampled) and token_ids[:1] == [sampled[-1]]
        return token_ids[is_repeated:]

    def parse(
        self,
        token_ids: Sequence[int],
        tools: Sequence[Message] | None = None,
        *,
        prompt_ids: Sequence[int],
        turn: int = 0,
    ) -> AssistantMessage:
        """Parse the sampled tokens of one turn to a message: content, reasoning and tool calls.

        Args:
            token_ids: the sampled tokens.
            tools: schemas of the conversation's tools, which say which arguments are texts if the format does not.
            prompt_ids: tokens before the turn, which may end inside the reasoning.
            turn: number of the turn in the trajectory; part of the ids of its calls.
        """
        # Mistral's ids must have this length.
        call_ids = (f"call{turn % 1000:03d}{number:02d}" for number in range(MAX_CALLS))
        if isinstance(self._parser, RenderersParser):
            return self._parser.parse(token_ids, tools, prompt_ids, call_ids)
        family = self._family
        hidden = frozenset[int]() if family is not None and family.has_channels else self._hidden_ids
        text = self.decode([token for token in token_ids if token not in hidden])
        in_thought = self._is_in_thought(prompt_ids)
        return read_message(text, family, call_ids, in_thought=in_thought, has_tools=bool(tools))

    def begin_message(
        self, tools: Sequence[Message] | None, *, prompt_ids: Sequence[int], stops: Sequence[str] = ()
    ) -> PartialMessage | None:
        """Return an incremental parser for a turn that is about to be sampled; None if only whole turns can be parsed.

        The strings ``stops`` end the text of the turn.
        """
        family, is_read_elsewhere = self._family, isinstance(self._parser, RenderersParser)
        if family is not None and family.call_start is None:
            return None
        return PartialMessage(
            TokenText(self.decode),
            hidden_ids=self._unread_ids,
            in_thought=self._is_in_thought(prompt_ids),
            is_stripped=is_read_elsewhere,
            call_start=family.call_start if family is not None and (tools or is_read_elsewhere) else None,
            stops=stops,
        )

    def check_tools(self) -> None:
        """Raise a ConfigError if this policy's chat template does not support tools, or tool calls cannot be parsed."""
        if not self.has_template:
            raise ConfigError(
                "Tools need a chat template, and the model's tokenizer has none. Use a model that was tuned for chats "
                "with tools, or set tokenizer.chat_template and save it."
            )
        if self._family is None or self._call_style is None:
            raise ConfigError(
                "The model's chat template writes tool calls in no form that is known, or has none. Use a model that "
                "was tuned for chats with tools."
            )
        if isinstance(self._parser, str):
            raise ConfigError(f"Tool calls as {self._family.name}'s are read by the package renderers, {self._parser}")

    def try_text(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, *, add_generation_prompt: bool
    ) -> str | None:
        """Return a conversation's text without special tokens at its end; None if the chat template rejects it."""
        try:
            text = self.render_text(messages, tools, add_generation_prompt)
        except ConfigError:
            return None
        return re.sub(rf"({self._special_text.pattern}|\s)+\Z", "", text)

    @cached_property
    def rewrites(self) -> str | None:
        """How the chat template changes earlier turns when messages follow, as text; None if it only appends."""
        return find_rewrites(self) if self.has_template else None

    def describe(self) -> str:
        """Return in a line how tool calls are parsed, and what the template changes in earlier turns."""
        if not self.has_template:
            return "Chats: the tokenizer has no chat template, so that contents follow each other as they are."
        reader = "no tools"
        if self._family is not None and self._call_style is not None:
            package = ", by the package renderers" if self._family.renderers else ""
            missing = f", {self._parser.rstrip('.')}" if isinstance(self._parser, str) else ""
            reader = f"tool calls as {self._family.name}'s{package}{missing}"
        if self.rewrites is None:
            return f"Chats: {reader}; the chat template is append-only, so that histories are what it renders."
        for name, value in _KEEPS_REASONING.items():
            kept = ChatFormat(self.tokenizer, {**self._arguments, name: value})
            if name in self._template and kept.rewrites is None:
                way = f"chat_template_arguments: {{{name}: {str(value).lower()}}} has it append only"
                break
        else:
            way = "a server that renders whole histories shows it less"
        return (
            f"Chats: {reader}; the chat template {self.rewrites}. Trajectories keep what was sampled, in one branch, "
            f"unless a client sends its history back changed; {way}."
        )

    @cached_property
    def _template(self) -> str:
        """The chat template; the one for tools if the tokenizer has several."""
        return str(self.tokenizer.get_chat_template(self._arguments.get("chat_template"), [_TOOL]))

    @cached_property
    def _family(self) -> Family | None:
        return find_family(self._template) if self.has_template else None

    @cached_property
    def _parser(self) -> RenderersParser | str | None:
        """The ``renderers`` parser of the model family, or the reason why there is none; None if it is not needed."""
        if self._family is None or not self._family.renderers:
            return None
        try:
            return RenderersParser(self.tokenizer, self._family, self._arguments)
        except ImportError:
            return f"which is not installed: {INSTALL}."
        except ConfigError as error:
            return f"which refuses the tokenizer: {error}."

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self.tokenizer.added_tokens_decoder
        return frozenset(self.tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}

    @cached_property
    def _hidden_ids(self) -> frozenset[int]:
        """Ids of special tokens that are left out of the text of a turn."""
        marks = (OPEN_THOUGHT, CLOSE_THOUGHT, *_CALL_TOKENS)
        return self._special_ids - {self.tokenizer.convert_tokens_to_ids(mark) for mark in marks}

    @cached_property
    def _unread_ids(self) -> frozenset[int]:
        """:attr:`_hidden_ids` without the tokens with which tool calls begin."""
        if self._family is None or self._family.call_start is None:
            return self._hidden_ids
        search = self._family.call_start.search
        return frozenset(token for token in self._hidden_ids if not search(self._name_token(token)))

    def _name_token(self, token_id: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(token_id))

    @cached_property
    def _special_text(self) -> re.Pattern[str]:
        texts = sorted(self.tokenizer.convert_ids_to_tokens(sorted(self._special_ids)), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    @cached_property
    def _call_style(self) -> tuple[str | None, bool] | None:
        """The message content, and whether arguments are JSON text, that the template requires for tool calls."""
        for content, is_text in product(("", None), (False, True)):
            call = _make_call("look_up", _MARK, is_text)
            message = {"role": "assistant", "content": content, "tool_calls": [call]}
            with suppress(ConfigError):
                text = self._apply([{"role": "user", "content": "hi"}, message], [_TOOL], False)
                if _MARK in text and "{'word'" not in text:
                    return content, is_text
        return None

    def _clean(self, messages: Sequence[Message]) -> list[Message]:
        cleaned = clean_messages(list(messages), "The conversation", has_fixed_fields=False)
        named = [self._set_reasoning(message) for message in cleaned]
        return [self._set_calls(message) if message.get("tool_calls") else message for message in named]

    def _set_reasoning(self, message: Message) -> Message:
        """Return a message whose reasoning is stored under each field name that chat templates read."""
        reasoning = next((message[name] for name in _REASONING if name in message), None)
        return message if reasoning is None else {**message, **dict.fromkeys(_REASONING, reasoning)}

    def _set_calls(self, message: Message) -> Message:
        """Convert the tool calls of a message to the template's format."""
        content, is_text = self._call_style or ("", False)
        calls = []
        for call in message["tool_calls"]:
            function = dict(call.get("function", call))
            arguments = function.get("arguments", {})
            if is_text and not isinstance(arguments, str):
                function["arguments"] = json.dumps(arguments, ensure_ascii=False)
            elif not is_text and isinstance(arguments, str):
                try:
                    function["arguments"] = json.loads(arguments or "{}")
                except ValueError as error:
                    raise ConfigError(f"The arguments of a tool call are no JSON: {cut_line(error)}.") from error
            calls.append({**call, "function": function})
        return {**message, "content": message["content"] or content, "tool_calls": calls}

    def _apply(self, messages: list[Message], tools: Sequence[Message] | None, add_generation_prompt: bool) -> str:
        def render(chat: list[Message]) -> str:
            return apply_template(
                self.tokenizer,
                chat,
                "The model's chat template refuses the conversation",
                self._arguments,
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
            )

        check_roles(messages, render, "The conversation")
        return render(messages)

    def _encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        token_ids: list[int] = self.tokenizer(text, add_special_tokens=add_special_tokens).input_ids
        return token_ids

    def _find_turn_close(self, messages: list[Message]) -> tuple[str | None, str]:
        """Return two texts that the template writes after the policy's turn. The first closes a turn at the end of the
        conversation, or is None without a special token; the second leads from an earlier turn to the next one.
        """
        answers = list(takewhile(lambda message: message["role"] == "tool", messages))
        if answers and self._call_style is not None:
            for kept in (answers, answers[-1:]):  # some templates allow one call in a message, or write only the first
                with suppress(ConfigError):
                    return self._find_turn_close_of_calls(kept, messages)
        text = self._apply_after_mark([*_PLAIN, *messages], True)
        return self._plain_close if self._special_text.search(self._plain_close) else None, text

    @cached_property
    def _plain_close(self) -> str:
        """The text that the template writes at the end of a last turn without tool calls."""
        return self._apply_after_mark(list(_PLAIN), False)

    def _find_turn_close_of_calls(self, answers: list[Message], messages: list[Message]) -> tuple[str | None, str]:
        assert self._call_style is not None
        content, is_text = self._call_style
        calls = []
        for answer in answers:
            call = _make_call(answer.get("name", "look_up"), _MARK if answer is answers[-1] else "x", is_text)
            calls.append({**call, "id": answer.get("tool_call_id", call["id"])})
        history: list[Message] = [_PLAIN[0], {"role": "assistant", "content": content, "tool_calls": calls}]
        close, text = self._apply_after_mark(history, False), self._apply_after_mark([*history, *messages], True)
        if not text.startswith(close):
            raise ConfigError("The model's chat template changes a tool call once its answer follows.")
        specials = list(self._special_text.finditer(close))
        start = specials[-1].start() if specials else len(close.rstrip())
        return close[start:] if specials else None, text[start:]

    def _apply_after_mark(self, messages: list[Message], add_generation_prompt: bool) -> str:
        """Render messages, and return the text after the placeholder of the policy's turn."""
        _, mark, text = self._apply(messages, None, add_generation_prompt).partition(_MARK)
        if not mark:
            raise ConfigError("The model's chat template leaves out what the policy wrote.")
        return text

    def _end_of_special(self, text: str) -> int:
        found = self._special_text.search(text)
        return 0 if found is None else found.end()

    def _is_in_thought(self, prompt_ids: Sequence[int]) -> bool:
        return self.decode(prompt_ids[-16:]).rstrip().endswith(OPEN_THOUGHT)


def find_rewrites(chat_format: ChatFormat) -> str | None:
    """Return what a chat template changes in earlier turns, found by rendering conversations; None if nothing."""
    user, other = {"role": "user", "content": "question"}, {"role": "user", "content": "another question"}
    call = _make_call("look_up", "x")
    answer = {"role": "tool", "tool_call_id": call["id"], "name": "look_up", "content": "found"}
    plain = {"role": "assistant", "content": "words"}
    thought = {**plain, "reasoning_content": _MARK}
    for turn, follows, tools in (
        (thought, other, None),
        (plain, other, None),
        (plain, other, [_TOOL]),
        ({**plain, "tool_calls": [call]}, answer, [_TOOL]),
        ({**thought, "tool_calls": [call]}, answer, [_TOOL]),
    ):
        begun = chat_format.try_text([user], tools, add_generation_prompt=True)
        said = chat_format.try_text([user, turn], tools, add_generation_prompt=False)
        after = chat_format.try_text([user, turn, follows], tools, add_generation_prompt=True)
        if begun is None or said is None or after is None:
            continue
        has_thought = _MARK in said or begun.endswith(OPEN_THOUGHT)
        if turn is plain and begun.endswith(OPEN_THOUGHT):
            continue  # a model that always reasons does not write this
        if not (after.startswith(said) and after.startswith(begun)):
            what = "reasoning" if has_thought and _MARK not in after else "earlier turns"
            verb = "drops" if what == "reasoning" else "changes"
            return f"{verb} {what} once {'an answer of a tool' if follows is answer else 'a message'} follows"
    return None


_CALL_TOKENS = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    *(DEEPSEEK_CALLS, DEEPSEEK_CALL, DEEPSEEK_ARGUMENTS, DEEPSEEK_END),
)


def _make_call(name: str, word: str, is_text: bool = False) -> Message:
    arguments = {"word": word}
    function = {"name": name, "arguments": json.dumps(arguments) if is_text else arguments}
    return {"id": "call00000", "type": "function", "function": function}
