"""Chats as tokens: rendered by the tokenizer's chat template, and read back from what was sampled.

A conversation is rendered once, at its start. What the policy samples after that stays as it was sampled, and only the
messages that follow it are rendered, in the form that the template gives them there.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any

from rlightning.data.chats import clean_messages
from rlightning.environments.messages import AssistantMessage, Message
from rlightning.environments.tool_formats import CLOSE_THOUGHT, OPEN_THOUGHT, RenderersParser, find_family, read_message
from rlightning.errors import ConfigError
from rlightning.foreign_text import cut_line

_MARK = "ANSWER OF THE POLICY"
"""Stands for what the policy has sampled where a chat template is asked what follows that."""
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
"""That templates are tried with."""


class ChatFormat:
    """The form in which a policy reads and writes chats. Without a chat template, contents follow each other.

    Args:
        tokenizer: the policy's.
        template_arguments: of its chat template, such as ``{"enable_thinking": False}``.
    """

    def __init__(self, tokenizer: Any, template_arguments: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._arguments = dict(template_arguments or {})

    @cached_property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return self._tokenizer.chat_template is not None

    def render(
        self, messages: Sequence[Message], tools: Sequence[Message] | None = None, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the tokens of a conversation.

        Args:
            messages: as in chat APIs.
            tools: schemas of the tools, as in chat APIs.
            add_generation_prompt: whether the policy's turn begins at the end.

        Raises:
            ConfigError: the template refuses it, or it has other contents than text.
        """
        text = self.render_text(messages, tools, add_generation_prompt)
        return self._encode(text, add_special_tokens=not self.has_template)

    def render_text(
        self, messages: Sequence[Message], tools: Sequence[Message] | None = None, add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a conversation; see :meth:`render`."""
        cleaned = self._clean(messages)
        if not self.has_template:
            if tools:
                self.check_tools()
            return "".join(message["content"] for message in cleaned)
        return self._apply(cleaned, tools, add_generation_prompt)

    def render_observations(self, messages: Sequence[Message], *, sampled: Sequence[int], ended: bool) -> list[int]:
        """Return the tokens from the end of the policy's turn to the beginning of its next one.

        Args:
            messages: that follow; answers of tools have the ``name`` of their tool, and come first.
            sampled: tokens of the policy's turn.
            ended: whether the policy ended it, rather than a limit. The token that ends a turn is not repeated then; it
                is added if a limit or a stop string came before it.
        """
        cleaned = self._clean(messages)
        if not self.has_template:
            return self._encode("".join(message["content"] for message in cleaned))
        text, has_close = self._find_rest(cleaned)
        is_closed = ended and bool(sampled) and sampled[-1] in self._special_ids
        if has_close and is_closed:
            found = self._special_text.search(text)
            assert found is not None
            return self._encode(text[found.end() :])
        token_ids = self._encode(text)
        is_repeated = ended and bool(sampled) and token_ids[:1] == [sampled[-1]]
        return token_ids[is_repeated:]

    def parse(
        self,
        token_ids: Sequence[int],
        tools: Sequence[Message] | None = None,
        *,
        prompt_ids: Sequence[int] | None = None,
        turn: int = 0,
    ) -> AssistantMessage:
        """Return what the tokens of a turn of the policy's say.

        Args:
            token_ids: as they were sampled.
            tools: that the conversation has; their schemas say which arguments are texts, where the form does not.
            prompt_ids: that the turn was sampled after; None: after the template's usual beginning of a turn.
            turn: its number in the trajectory, that the ids of its calls have.
        """
        call_ids = (f"call{turn:03d}{number:02d}" for number in range(100))  # nine characters, as Mistral's
        if isinstance(self._parser, RenderersParser):
            return self._parser.parse(token_ids, tools, prompt_ids, call_ids)
        kept = {self._tokenizer.convert_tokens_to_ids(token) for token in (OPEN_THOUGHT, CLOSE_THOUGHT, *_CALL_TOKENS)}
        hidden = self._special_ids - kept
        text = self._tokenizer.decode([token for token in token_ids if token not in hidden], skip_special_tokens=False)
        family = self._family if tools else None
        return read_message(text, family, call_ids, in_thought=self._is_in_thought(prompt_ids))

    def check_tools(self) -> None:
        """Raise a ConfigError if the policy cannot be given tools."""
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
        if self._family.renderer is not None and not isinstance(self._parser, RenderersParser):
            raise ConfigError(
                f"Tool calls of {self._family.name} are read by the package renderers, which is not installed: pip "
                "install renderers."
            )

    def describe(self) -> str:
        """Return in a line how tool calls are read, and what the template changes in earlier turns."""
        return "The tokenizer has a chat template." if self.has_template else "The tokenizer has no chat template."

    @cached_property
    def _family(self) -> Any:
        return find_family(self._tokenizer.chat_template) if self.has_template else None

    @cached_property
    def _parser(self) -> RenderersParser | None:
        if self._family is None or self._family.renderer is None:
            return None
        try:
            return RenderersParser(self._tokenizer, self._family)
        except ImportError:
            return None

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self._tokenizer.added_tokens_decoder
        return frozenset(self._tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}

    @cached_property
    def _special_text(self) -> re.Pattern[str]:
        texts = sorted(self._tokenizer.convert_ids_to_tokens(sorted(self._special_ids)), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    @cached_property
    def _call_style(self) -> tuple[str | None, bool] | None:
        """How the template takes messages with calls: their content, and whether arguments are JSON text."""
        for content in ("", None):
            for is_text in (False, True):
                arguments: Any = {"word": _MARK}
                call = _make_call("look_up", json.dumps(arguments) if is_text else arguments)
                message = {"role": "assistant", "content": content, "tool_calls": [call]}
                try:
                    text = self._apply([{"role": "user", "content": "hi"}, message], [_TOOL], False)
                except ConfigError:
                    continue
                if _MARK in text and "{'word'" not in text:
                    return content, is_text
        return None

    def _clean(self, messages: Sequence[Message]) -> list[Message]:
        cleaned = clean_messages(list(messages), "The conversation", has_fixed_fields=False)
        return [self._set_calls(message) if message.get("tool_calls") else message for message in cleaned]

    def _set_calls(self, message: Message) -> Message:
        """Return a message whose calls have the form that the template takes."""
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
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._arguments,
            )
        except Exception as error:  # a template is a program of the model's author, which may raise anything
            raise ConfigError(f"The model's chat template refuses the conversation: {cut_line(error)}.") from error
        return str(text)

    def _encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=add_special_tokens).input_ids
        return token_ids

    def _find_rest(self, messages: list[Message]) -> tuple[str, bool]:
        """Return the text from the end of the policy's content to its next turn.

        Returns:
            The text, and whether it begins with what closes the policy's turn, which has a special token.
        """
        answers = list(takewhile(lambda message: message["role"] == "tool", messages))
        if answers and self._call_style is not None:
            for kept in (answers, answers[-1:]):  # some templates take one call a message
                try:
                    return self._find_rest_of_calls(kept, messages)
                except ConfigError:
                    if len(kept) == 1:
                        raise
        history: list[Message] = [{"role": "user", "content": ""}, {"role": "assistant", "content": _MARK}]
        ended = self._apply(history, None, False).rpartition(_MARK)[2]
        text = self._apply([*history, *messages], None, True).rpartition(_MARK)[2]
        return text, self._special_text.search(ended) is not None

    def _find_rest_of_calls(self, answers: list[Message], messages: list[Message]) -> tuple[str, bool]:
        assert self._call_style is not None
        content, is_text = self._call_style
        calls = []
        for answer in answers:
            arguments: Any = {"word": _MARK}
            call = _make_call(answer.get("name", "look_up"), json.dumps(arguments) if is_text else arguments)
            calls.append({**call, "id": answer.get("tool_call_id", call["id"])})
        history: list[Message] = [
            {"role": "user", "content": ""},
            {"role": "assistant", "content": content, "tool_calls": calls},
        ]
        ended = self._apply(history, None, False).rpartition(_MARK)[2]
        text = self._apply([*history, *messages], None, True).rpartition(_MARK)[2]
        if not text.startswith(ended):
            raise ConfigError("The model's chat template changes a tool call once its answer follows.")
        closes = list(self._special_text.finditer(ended))
        return text[closes[-1].start() if closes else len(ended.rstrip()) :], bool(closes)

    def _is_in_thought(self, prompt_ids: Sequence[int] | None) -> bool:
        if prompt_ids is None:
            return self._opens_thought
        end = self._tokenizer.decode(list(prompt_ids[-16:]), skip_special_tokens=False)
        return bool(end.rstrip().endswith(OPEN_THOUGHT))

    @cached_property
    def _opens_thought(self) -> bool:
        if not self.has_template:
            return False
        return self._apply([{"role": "user", "content": "hi"}], None, True).rstrip().endswith(OPEN_THOUGHT)


_CALL_TOKENS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]")


def _make_call(name: str, arguments: Any) -> Message:
    return {"id": "call00000", "type": "function", "function": {"name": name, "arguments": arguments}}
