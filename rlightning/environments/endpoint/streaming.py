"""Streamed responses: events that are sent while the turns of a request are sampled."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from rlightning.environments.messages import AssistantMessage
from rlightning.environments.partial_message import PartialMessage
from rlightning.environments.recorder import RecordedTurn
from rlightning.python_values import JsonObject

Event = tuple[str | None, JsonObject | str]
"""An event of a stream: its name (None in an API without names), and its data."""
Emit = Callable[[Event], None]
Reply = JsonObject | None
"""The body of a response; None if all of it was sent as events of a stream."""


class Answers(NamedTuple):
    """The turns that answer a request, one for each choice, and the prompt's length in tokens."""

    turns: list[RecordedTurn]
    num_prompt_tokens: int


class EventWriter(ABC):
    """Base class of an API's response format: converts the turns of a request to one response body or to a stream of
    events.
    """

    def __init__(self) -> None:
        self._num_written: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))

    @abstractmethod
    def write(self, answers: Answers) -> JsonObject:
        """Return the body of a response that is not streamed."""

    def begin(self, num_prompt_tokens: int) -> Iterable[Event]:
        """Return the events that open a stream, before those of any choice; none by default."""
        return ()

    @abstractmethod
    def add(self, choice: int, reasoning: str, content: str) -> Iterable[Event]:
        """Return the events that append new text to a choice.

        Args:
            choice: index of the choice.
            reasoning: all of the choice's reasoning so far that later tokens cannot change.
            content: all of its content so far that later tokens cannot change.
        """

    @abstractmethod
    def end(self, answers: Answers) -> Iterable[Event]:
        """Return the last events, after all choices are complete."""

    def _take_new(self, choice: int, reasoning: str, content: str) -> tuple[str, str]:
        """Return the parts of a choice's texts that have not been written yet, and mark them as written."""
        num_reasoning, num_content = self._num_written[choice]
        self._num_written[choice] = len(reasoning), len(content)
        return reasoning[num_reasoning:], content[num_content:]


class TurnStream:
    """Sends the events of a streamed response while its turns are sampled. Nothing is sent before the first token, so
    that an earlier error can still be answered with an HTTP status.
    """

    def __init__(self, writer: EventWriter, emit: Emit) -> None:
        self._writer, self._emit = writer, emit
        self._messages: Sequence[PartialMessage | None] = ()
        self._num_prompt_tokens = self._num_finished = 0
        self._has_begun = False

    def expect(self, messages: Sequence[PartialMessage | None], num_prompt_tokens: int) -> None:
        """Store each choice's incremental parser, before sampling; None if only a whole turn can be parsed."""
        self._messages, self._num_prompt_tokens = messages, num_prompt_tokens

    def add_tokens(self, number: int, token_ids: Sequence[int]) -> None:
        """Add the next tokens of a choice, and emit their events."""
        self._begin()
        message = self._messages[number]
        if message is not None and message.add(token_ids):
            self._emit_all(self._writer.add(number, message.reasoning, message.content))

    def finish(self, message: AssistantMessage) -> AssistantMessage:
        """Return the next choice's whole message. A text that does not begin with the part that was already sent is
        replaced by that part. Call it once for each choice, in their order.
        """
        partial = self._messages[self._num_finished]
        self._num_finished += 1
        return message if partial is None else partial.finish(message)

    def end(self, answers: Answers) -> None:
        """Emit the events that close the stream, after those that open it if there was no token."""
        self._begin()
        self._emit_all(self._writer.end(answers))

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._emit_all(self._writer.begin(self._num_prompt_tokens))

    def _emit_all(self, events: Iterable[Event]) -> None:
        for event in events:
            self._emit(event)


async def answer(
    writer: EventWriter, emit: Emit | None, sample: Callable[[TurnStream | None], Awaitable[Answers]]
) -> Reply:
    """Return the response to a request as one body if ``emit`` is None; otherwise pass its events to ``emit`` while
    turns are sampled, and return None.

    ``sample`` samples the turns, and adds their tokens to its argument, the stream.
    """
    stream = None if emit is None else TurnStream(writer, emit)
    answers = await sample(stream)
    if stream is None:
        return writer.write(answers)
    stream.end(answers)
    return None


class BlockWriter(EventWriter):
    """Writes a stream in which a turn is a sequence of blocks: reasoning, text, tool calls."""

    def __init__(self) -> None:
        super().__init__()
        self._open: str | None = None
        self._texts = {"reasoning": "", "content": ""}
        self._num_blocks = 0

    @abstractmethod
    def _begin_block(self, kind: str) -> Iterable[Event]:
        """Return the events that open block number ``_num_blocks`` with ``kind`` "reasoning" or "content"."""

    @abstractmethod
    def _extend_block(self, kind: str, text: str) -> Iterable[Event]:
        """Return the events that append ``text`` to the open block."""

    @abstractmethod
    def _end_block(self, kind: str, text: str) -> Iterable[Event]:
        """Return the events that close the open block, whose whole text is ``text``."""

    def add(self, choice: int, reasoning: str, content: str) -> Iterator[Event]:
        """Yield the events that append new text to a choice, and those that close and open blocks."""
        new = self._take_new(choice, reasoning, content)
        for kind, text in zip(("reasoning", "content"), new, strict=True):
            if text:
                yield from self._switch(kind)
                self._texts[kind] += text
                yield from self._extend_block(kind, text)

    def _switch(self, kind: str | None) -> Iterator[Event]:
        """Close the open block, and open one of another kind; None opens none."""
        if kind == self._open:
            return
        if self._open is not None:
            yield from self._end_block(self._open, self._texts[self._open])
            self._num_blocks += 1
        self._open = kind
        if kind is not None:
            yield from self._begin_block(kind)
