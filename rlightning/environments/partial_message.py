"""The message of a turn that is still being sampled: only the part that later tokens cannot change."""

import re
from collections.abc import Callable, Sequence

from rlightning.environments.messages import AssistantMessage
from rlightning.environments.tool_formats import OPEN_THOUGHT, split_thought
from rlightning.rollout.detokenize import UNFINISHED

OPEN_MARK = re.compile(r"[<\[][^\s>\]]{0,40}\Z")
"""A possible beginning, at the end of a text, of a marker of a tool call or of the end of the reasoning."""


class TokenText:
    """Decodes tokens step by step, and never returns an incomplete character.

    ``context`` are the preceding tokens, which affect the first decoded tokens in some tokenizers.
    """

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._token_ids = list(context)
        self._start, self._end = 0, len(self._token_ids)

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the text that new tokens add; an incomplete character is returned once it is complete."""
        self._token_ids += token_ids
        before = self._decode(self._token_ids[self._start : self._end])
        text = self._decode(self._token_ids[self._start :])
        if text.endswith(UNFINISHED) or not text.startswith(before):
            return ""
        self._start, self._end = self._end, len(self._token_ids)
        return text[len(before) :]


class PartialMessage:
    """Parses a turn while it is sampled: the part of its reasoning and content that later tokens cannot change.

    Args:
        hidden_ids: tokens that are left out of the text.
        reads_thought: whether reasoning is separated from the content.
        in_thought: whether the turn begins inside the reasoning.
        is_stripped: whether white space at both ends is removed from the message.
        call_start: marker that begins tool calls, after which no text is returned early. None if calls stay text.
        stops: strings that end the text and are left out of it.

    Attributes:
        reasoning: the part that later tokens cannot change.
        content: the part that later tokens cannot change.
    """

    def __init__(
        self,
        text: TokenText,
        *,
        hidden_ids: frozenset[int] = frozenset(),
        reads_thought: bool = True,
        in_thought: bool = False,
        is_stripped: bool = False,
        call_start: re.Pattern[str] | None = None,
        stops: Sequence[str] = (),
    ) -> None:
        self.reasoning = self.content = ""
        self._tokens, self._hidden_ids, self._stops = text, hidden_ids, stops
        self._reads_thought, self._in_thought, self._is_stripped = reads_thought, in_thought, is_stripped
        self._call_start = call_start
        self._text = ""

    def add(self, token_ids: Sequence[int]) -> bool:
        """Add the next tokens; return whether reasoning or content has grown."""
        self._text += self._tokens.add([token for token in token_ids if token not in self._hidden_ids])
        before = self.reasoning, self.content
        if not self._reads_thought:
            self.content = self._certain_content(self._text)
        elif not OPEN_THOUGHT.startswith(self._text.strip()):
            reasoning, content = split_thought(self._text, in_thought=self._in_thought)
            if reasoning is not None:
                self.reasoning = self._strip(reasoning if content is not None else _without_open_end(reasoning))
            if content is not None:
                self.content = self._certain_content(self._strip(content))
        return before != (self.reasoning, self.content)

    def finish(self, message: AssistantMessage) -> AssistantMessage:
        """Return the message of the whole turn. A text that does not begin with the part that was already sent is
        replaced by that part.
        """
        return message._replace(
            content=_keep_certain(self.content, message.content),
            reasoning=_keep_certain(self.reasoning, message.reasoning or "") or message.reasoning,
        )

    def _certain_content(self, text: str) -> str:
        begun = None if self._call_start is None else self._call_start.search(text)
        certain = _without_open_end(text if begun is None else text[: begun.start()])
        for stop in self._stops:
            found = certain.find(stop)
            is_open = (length for length in range(len(stop) - 1, 0, -1) if text.endswith(stop[:length]))
            end = found if found >= 0 else len(text) - next(is_open, 0)
            certain = certain[:end]
        return certain

    def _strip(self, text: str) -> str:
        return text.lstrip() if self._is_stripped else text


def _without_open_end(text: str) -> str:
    """Return a text without an incomplete marker at its end, and without white space before that."""
    return OPEN_MARK.sub("", text).rstrip()


def _keep_certain(certain: str, whole: str) -> str:
    """Return the whole text; only the part already sent if the parsed text does not begin with it."""
    return whole if whole.startswith(certain) else certain
