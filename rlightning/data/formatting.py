"""From rows to prompts: template, chat template, tokens, and the limit on their length."""

import logging
import string
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date, time, timedelta
from numbers import Number
from typing import Any, Literal

import numpy as np

from rlightning.data.arrow_rows import Row
from rlightning.data.chats import (
    Message,
    check_template_arguments,
    clean_messages,
    find_open_thought,
    is_chat,
    render_chat,
)
from rlightning.data.listed_rows import STORED_ROWS
from rlightning.data.mapped import COLUMNS, OF_PROMPT, map_prompts
from rlightning.data.own_sampling import read_limit, read_temperature
from rlightning.data.sources import RowTable
from rlightning.data.summary import Note, summarize
from rlightning.data.tokens import Tokens, check_characters, cut_prompt, tokenize
from rlightning.errors import ConfigError, did_you_mean
from rlightning.foreign_text import cut_value
from rlightning.types import Prompt

logger = logging.getLogger(__name__)

_ROWS_A_BATCH = 1000  # tokenizers return far more than the ids that are kept


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """How a row becomes what the model reads.

    Attributes:
        column: the column that holds the prompt: text, or a list of chat messages.
        template: a format string over the row's columns, used instead of ``column``.
        system: the first message of every chat; before a plain text, with an empty line between.
        chat_template: whether to apply the tokenizer's; None: where it has one.
        chat_template_arguments: passed to the chat template, such as ``enable_thinking``.
        max_tokens: of a prompt.
        overlong: what to do with longer ones; "truncate" keeps their end.
        completion_column: the column of a completion to learn; None: rows hold none.
        temperature_column: the column of temperatures of the rows' own; None: all are sampled at the run's.
        max_new_tokens_column: the column of limits on the rows' completions; None: all have the run's.
    """

    column: str = "prompt"
    template: str | None = None
    system: str | None = None
    chat_template: bool | None = None
    chat_template_arguments: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 1024
    overlong: Literal["drop", "truncate"] = "drop"
    completion_column: str | None = None
    temperature_column: str | None = None
    max_new_tokens_column: str | None = None

    @property
    def own_sampling(self) -> dict[str, str | None]:
        """The columns of the rows' own sampling, by argument."""
        return {name: getattr(self, name) for name in ("temperature_column", "max_new_tokens_column")}

    def without_missing(self, columns: Collection[str]) -> "PromptFormat":
        """Return the format of a set without the rows' own sampling, as far as the set has no column of it."""
        absent: dict[str, Any] = {name: None for name, column in self.own_sampling.items() if column not in columns}
        return replace(self, **absent)


def build_prompts(
    table: RowTable,
    tokenizer: Any,
    prompt_format: PromptFormat,
    *,
    vocab_size: int | None = None,
    max_length: int | None = None,
) -> Sequence[Prompt]:
    """Render, tokenise and check every row; count, say and drop or cut prompts that are too long.

    Args:
        table: the rows.
        tokenizer: a Hugging Face tokenizer.
        prompt_format: how.
        vocab_size: rows of the model's embedding, which no token may be beyond; None: unknown.
        max_length: the model's positions, for prompts that have a completion; None: unknown.

    Returns:
        At least one prompt, each of 1 to ``prompt_format.max_tokens`` tokens, in the order of the rows: a list, or for
        a large set a sequence whose tokens stay on disk, tokenised once for all processes and later starts.
    """
    encoder = PromptEncoder(tokenizer, prompt_format, vocab_size=vocab_size, max_length=max_length)
    require_columns(table, encoder.columns)
    drop_above = prompt_format.max_tokens if prompt_format.overlong == "drop" else None
    prompts: Sequence[Prompt]
    if isinstance(table.rows, STORED_ROWS):
        prompts, summary = map_prompts(table, encoder, prompt_format.max_tokens, is_dropping=drop_above is not None)
    else:
        prompts, lengths, notes = _encode_in_memory(table, encoder)
        summary = summarize(np.array(lengths), np.array(notes), prompt_format.max_tokens)
        if drop_above is not None and 0 < summary.num_overlong < len(prompts):
            prompts = [prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= drop_above]
    summary.report(table, prompt_format.max_tokens, prompt_format.overlong, max_length)
    return prompts


class PromptEncoder:
    """Turns rows into texts and tokens, and refuses those that cannot be used, by their place."""

    def __init__(
        self, tokenizer: Any, prompt_format: PromptFormat, *, vocab_size: int | None, max_length: int | None
    ) -> None:
        self.tokenizer = tokenizer
        self.format = prompt_format
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.is_chat = _is_chat(tokenizer, prompt_format)
        if self.is_chat:
            check_template_arguments(tokenizer, prompt_format.chat_template_arguments)
        elif prompt_format.chat_template_arguments:
            raise ConfigError(
                f"chat_template_arguments={prompt_format.chat_template_arguments} have no effect: no chat template is "
                "applied. Remove them, or use a tokenizer that has one."
            )
        template, column = prompt_format.template, prompt_format.column
        self.columns = [column] if template is None else _template_columns(template)
        self.columns += [column for column in prompt_format.own_sampling.values() if column is not None]
        if prompt_format.completion_column is not None:
            self.columns.append(prompt_format.completion_column)
            if tokenizer.eos_token_id is None:
                raise ConfigError(
                    "The tokenizer has no end-of-sequence token to end a completion with. Set its eos_token."
                )
        self._special_tokens = tuple(
            str(token) for token in tokenizer.added_tokens_decoder.values() if token.special and str(token)
        )

    @property
    def identity(self) -> dict[str, Any]:
        """Everything besides the rows that the tokens follow from."""
        import tokenizers
        import transformers

        tokenizer = self.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        return {
            "format": asdict(self.format),
            "limits": [self.vocab_size, self.max_length],
            "class": type(tokenizer).__name__,
            "tokenizer": backend.to_str() if backend else sorted(tokenizer.get_vocab().items()),
            "template": tokenizer.chat_template,
            "special": tokenizer.special_tokens_map,
            "versions": [tokenizers.__version__, transformers.__version__],
        }

    def encode(self, table: RowTable, start: int, stop: int) -> dict[str, list[Any]]:
        """Return the columns of :data:`~rlightning.data.mapped.COLUMNS` of some rows.

        ``num_tokens`` are those of the prompt before it is cut; ``notes`` are :class:`Note` flags.
        """
        rows = table.rows[start:stop]
        places = range(start, stop)
        rendered = [self._render(row, table, i) for row, i in zip(rows, places, strict=True)]
        completions = None
        if self.format.completion_column is not None:
            completions = [self._read_completion(row, table, i) for row, i in zip(rows, places, strict=True)]
        texts = [text for text, _ in rendered]
        encoded = tokenize(self.tokenizer, texts, completions, has_special_tokens=self.is_chat)
        columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        for i, (text, note), tokens in zip(places, rendered, encoded, strict=True):
            for name, value in self._finish(text, note, tokens, table, i).items():
                columns[name].append(value)
        for row, i in zip(rows, places, strict=True):
            where = table.where(i)
            columns["temperature"].append(read_temperature(row, self.format.temperature_column, where))
            columns["max_new_tokens"].append(read_limit(row, self.format.max_new_tokens_column, where))
        return columns

    def _render(self, row: Row, table: RowTable, place: int) -> tuple[str, Note]:
        """The text that the model reads."""
        where = table.where(place)
        content = self._read_content(row, table, place)
        system = self.format.system
        if not self.is_chat:
            if not isinstance(content, str):
                raise ConfigError(
                    f"{where} holds chat messages, but no chat template is applied. Use chat_template=True, or texts."
                )
            text = content if system is None else f"{system}\n\n{content}"
            check_characters(text, where, "prompt")
            return text, Note(0)
        arguments = self.format.chat_template_arguments
        text = render_chat(self.tokenizer, _to_messages(content, system), arguments, where)
        note = Note(0)
        if isinstance(content, str) and content.startswith(self._special_tokens):
            opening = next(token for token in self._special_tokens if content.startswith(token))
            if text.startswith(opening) or opening == self.tokenizer.bos_token:
                text, note = content, Note.RENDERED_BEFORE
                if self.tokenizer.eos_token and text.endswith(self.tokenizer.eos_token):
                    text, note = text.removesuffix(self.tokenizer.eos_token), note | Note.DROPPED_EOS
        check_characters(text, where, "prompt")
        return text, note

    def _read_content(self, row: Row, table: RowTable, place: int) -> str | list[Message]:
        where = table.where(place)
        if self.format.template is not None:
            return _fill_template(self.format.template, row, where)
        column = self.format.column
        content = row[column]
        if isinstance(content, str):
            return content
        if is_chat(content):
            return clean_messages(content, where, has_fixed_fields=table.has_fixed_fields)
        rule = "Write a text, or a list of messages with role and content"
        raise ConfigError(f"{where}: column '{column}' holds {cut_value(content)}. {rule}.")

    def _read_completion(self, row: Row, table: RowTable, place: int) -> str:
        column = str(self.format.completion_column)
        text = row[column]
        where = table.where(place)
        if not isinstance(text, str):
            raise ConfigError(
                f"{where}: completion_column='{column}' holds {cut_value(text)}. It must be text: correct or remove "
                "the row."
            )
        check_characters(text, where, "completion")
        return text

    def _finish(self, text: str, note: Note, tokens: Tokens, table: RowTable, place: int) -> dict[str, Any]:
        prompt = tokens.prompt
        where = table.where(place)
        if not prompt and text:
            raise ConfigError(
                f"{where}: the prompt {cut_value(text)} ends within the completion's first token, and nothing before "
                "that could predict it. Remove the row or lengthen its prompt."
            )
        if not prompt:
            raise ConfigError(f"{where}: the prompt is empty. Remove the row or give it a text.")
        note |= Note.DROPPED_BOS if tokens.has_dropped_bos else Note(0)
        note |= Note.DROPPED_EOS if tokens.has_dropped_eos else Note(0)
        note |= Note.INSIDE_THOUGHT if find_open_thought(text) else Note(0)
        note |= Note.EMPTY_COMPLETION if tokens.completion is not None and not tokens.completion else Note(0)
        num_tokens, limit = len(prompt), self.format.max_tokens
        is_dropped = num_tokens > limit and self.format.overlong == "drop"
        if num_tokens > limit and not is_dropped:
            prompt, tail = cut_prompt(self.tokenizer, prompt, limit)
            text = self.tokenizer.decode(prompt if self.is_chat else tail)
        completion = None if tokens.completion is None else [*tokens.completion, self.tokenizer.eos_token_id]
        if completion and self.max_length and len(prompt) + len(completion) > self.max_length and not is_dropped:
            note |= Note.BEYOND_POSITIONS
        self._check_vocabulary(prompt + (completion or []), where)
        return {
            "text": text,
            "token_ids": prompt,
            "completion_ids": completion,
            "num_tokens": num_tokens,
            "notes": int(note),
        }

    def _check_vocabulary(self, token_ids: list[int], where: str) -> None:
        highest = max(token_ids)
        if self.vocab_size is not None and highest >= self.vocab_size:
            raise ConfigError(
                f"{where}: its token {highest} ({self.tokenizer.decode([highest])!r}) is beyond the model's embedding "
                f"of {self.vocab_size} tokens. Use the model's own tokenizer, or resize the embedding."
            )


def _encode_in_memory(table: RowTable, encoder: PromptEncoder) -> tuple[list[Prompt], list[int], list[int]]:
    """The prompts of all rows, the lengths that they had, and their notes."""
    prompts: list[Prompt] = []
    lengths: list[int] = []
    notes: list[int] = []
    for start in range(0, len(table.rows), _ROWS_A_BATCH):
        stop = min(start + _ROWS_A_BATCH, len(table.rows))
        columns = encoder.encode(table, start, stop)
        rows = table.rows[start:stop]
        for i, row, *values in zip(range(start, stop), rows, *(columns[name] for name in OF_PROMPT), strict=True):
            prompts.append(Prompt(index=i, columns=row, **dict(zip(OF_PROMPT, values, strict=True))))
        lengths += columns["num_tokens"]
        notes += columns["notes"]
    return prompts, lengths, notes


def _is_chat(tokenizer: Any, prompt_format: PromptFormat) -> bool:
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if prompt_format.chat_template and not has_template:
        name = getattr(tokenizer, "name_or_path", "")
        raise ConfigError(f"chat_template=True, but the tokenizer '{name}' has none. Use chat_template=False.")
    return has_template if prompt_format.chat_template is None else prompt_format.chat_template


def _template_columns(template: str) -> list[str]:
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(
            f"prompt_template={template!r} is no format string: {error}. Write a brace as {{{{ or }}}}."
        ) from error
    columns = [name.split(".")[0].split("[")[0] for name in names]
    if not columns or not all(column and not column.isdigit() for column in columns):
        raise ConfigError(f"prompt_template={template!r} must name columns in its braces, such as 'Q: {{question}}'.")
    return columns


class _TemplateFormatter(string.Formatter):
    """Fills templates with texts, numbers and times; anything else would show as Python writes it, such as ``None``."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        """Check a value before ``!s``, ``!r`` or ``!a`` makes a text of it."""
        if not isinstance(value, str | Number | date | time | timedelta) or value != value:
            raise TypeError(f"it would write {cut_value(value)} into the prompt, where texts and numbers can stand")
        return super().convert_field(value, conversion)


def _fill_template(template: str, row: Row, where: str) -> str:
    try:
        return _TemplateFormatter().vformat(template, (), row)
    except (ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else str(error)
        raise ConfigError(
            f"{where}: prompt_template={template!r} cannot be filled: {reason}. Correct or remove the row."
        ) from error


def require_columns(table: RowTable, columns: list[str]) -> None:
    """Refuse a set in which a row lacks a column; nothing is read where every row is known to have them."""
    missing_columns = [column for column in columns if column not in table.columns]
    for column in missing_columns:
        missing = [i for i, row in enumerate(table.rows) if column not in row]
        if len(missing) == len(table.rows):
            raise ConfigError(f"'{table.path}' has no column '{column}'. {did_you_mean(column, table.rows[0])}")
        raise ConfigError(
            f"{table.where(missing[0])} has no column '{column}', which other rows have. "
            f"{did_you_mean(column, table.rows[missing[0]])}"
        )


def _to_messages(content: str | list[Message], system: str | None) -> list[Message]:
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if system is None or messages[0]["role"] == "system":  # a row's own system message comes first
        return messages
    return [{"role": "system", "content": system}, *messages]
