"""Converts rows to prompts: template, chat template, tokens, and the limit on prompt length."""

import string
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date, time, timedelta
from numbers import Number
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rlightning.data.chats import (
    Message,
    check_template_arguments,
    clean_messages,
    find_open_thought,
    is_chat,
    render_chat,
)
from rlightning.data.mapped import COLUMNS, OF_PROMPT, Columns, map_prompts
from rlightning.data.own_sampling import read_limit, read_temperature
from rlightning.data.rows import Row, StoredRows
from rlightning.data.sources import RowTable
from rlightning.data.summary import Note, summarize
from rlightning.data.tokens import Tokens, check_characters, cut_prompt, tokenize
from rlightning.errors import ConfigError, did_you_mean
from rlightning.foreign_text import cut_value
from rlightning.protocols import HasBackend, has
from rlightning.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

_ROWS_A_BATCH = 1000  # tokenizers return much more than the ids


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """How a row is converted to a prompt: arguments of :class:`~rlightning.data.PromptDataModule`.

    ``completion_column`` is the column of the completion to learn; None without one.
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
    def own_sampling(self) -> dict[str, str]:
        """The columns of each row's own temperature and token limit, if configured, by argument name."""
        columns = {
            "temperature_column": self.temperature_column,
            "max_new_tokens_column": self.max_new_tokens_column,
        }
        return {name: column for name, column in columns.items() if column is not None}

    def without_absent_columns(self, columns: Collection[str]) -> "PromptFormat":
        """Return this format without the sampling columns (temperature, token limit) that a set lacks."""
        absent: dict[str, Any] = {name: None for name, column in self.own_sampling.items() if column not in columns}
        return replace(self, **absent)


USUAL = PromptFormat()
"""The default format: prompts are in the column ``prompt``."""


def prompt_messages(columns: Row, prompt_format: PromptFormat, where: str) -> list[Message]:
    """Return the chat messages of a row's prompt, as they are passed to the chat template."""
    content = _read_content(columns, prompt_format, where, has_fixed_fields=True)
    return _to_messages(content, prompt_format.system)


def build_prompts(
    table: RowTable,
    tokenizer: "Tokenizer",
    prompt_format: PromptFormat,
    *,
    vocab_size: int | None = None,
    max_length: int | None = None,
) -> Sequence[Prompt]:
    """Return the prompts of a table's rows, rendered, tokenised and checked; drop or cut those that are too long.

    Args:
        vocab_size: number of rows of the model's embedding, the limit of token ids; None if unknown.
        max_length: the model's number of positions, for prompts with a completion; None if unknown.

    Returns:
        At least one prompt, each of 1 to ``prompt_format.max_tokens`` tokens, in the order of the rows: a list, or for
        a large set a sequence on disk, which is tokenised once for all processes and later starts.
    """
    encoder = PromptEncoder(tokenizer, prompt_format, vocab_size=vocab_size, max_length=max_length)
    require_columns(table, encoder.columns)
    limit, is_dropping = prompt_format.max_tokens, prompt_format.overlong == "drop"
    prompts: Sequence[Prompt]
    if isinstance(table.rows, StoredRows):
        prompts, summary = map_prompts(table, encoder, limit, is_dropping=is_dropping)
    else:
        prompts, lengths, notes = _encode_in_memory(table, encoder)
        summary = summarize(np.array(lengths), np.array(notes), limit)
        if is_dropping and 0 < summary.num_overlong < len(prompts):
            prompts = [prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= limit]
    summary.report(table, limit, prompt_format.overlong, max_length)
    return prompts


class PromptEncoder:
    """Converts rows to texts and tokens; errors name the row by its file and line."""

    def __init__(
        self, tokenizer: "Tokenizer", prompt_format: PromptFormat, *, vocab_size: int | None, max_length: int | None
    ) -> None:
        self.tokenizer, self.format = tokenizer, prompt_format
        self.vocab_size, self.max_length = vocab_size, max_length
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
        self.columns += prompt_format.own_sampling.values()
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
    def identity(self) -> dict[str, object]:
        """All settings that affect the tokens of a row, for the key of a cache."""
        import tokenizers
        import transformers

        tokenizer = self.tokenizer
        backend = tokenizer.backend_tokenizer if has(tokenizer, HasBackend) else None
        return {
            "format": asdict(self.format),
            "limits": [self.vocab_size, self.max_length],
            "class": type(tokenizer).__name__,
            "tokenizer": backend.to_str() if backend else sorted(tokenizer.get_vocab().items()),
            "template": tokenizer.chat_template,
            "special": tokenizer.special_tokens_map,
            "versions": [tokenizers.__version__, transformers.__version__],
        }

    def encode(self, table: RowTable, start: int, stop: int) -> Columns:
        """Return the texts, token ids and other :data:`~rlightning.data.mapped.COLUMNS` of rows ``start`` to ``stop``.

        ``num_tokens`` are the prompt's tokens before it is cut; ``notes`` are :class:`Note` flags.
        """
        rows = table.rows[start:stop]
        places = [table.where(place) for place in range(start, stop)]
        rendered = [self._render(row, where, table) for row, where in zip(rows, places, strict=True)]
        completions = None
        if self.format.completion_column is not None:
            completions = [self._read_completion(row, where) for row, where in zip(rows, places, strict=True)]
        encoded = tokenize(self.tokenizer, [text for text, _ in rendered], completions, has_special_tokens=self.is_chat)
        columns: Columns = {name: [] for name in COLUMNS}
        for row, where, (text, note), tokens in zip(rows, places, rendered, encoded, strict=True):
            values = self._finish(text, note, tokens, where)
            values["temperature"] = read_temperature(row, self.format.temperature_column, where)
            values["max_new_tokens"] = read_limit(row, self.format.max_new_tokens_column, where)
            for name, listed in columns.items():
                listed.append(values[name])
        return columns

    def _render(self, row: Row, where: str, table: RowTable) -> tuple[str, Note]:
        """Return the text of a row's prompt for the model."""
        content = _read_content(row, self.format, where, has_fixed_fields=table.has_fixed_fields)
        system, note = self.format.system, Note(0)
        if self.is_chat:
            arguments = self.format.chat_template_arguments
            text = render_chat(self.tokenizer, _to_messages(content, system), arguments, where)
            if isinstance(content, str) and self._is_rendered(content, text):
                text, note = content, Note.RENDERED_BEFORE
                if self.tokenizer.eos_token and text.endswith(self.tokenizer.eos_token):
                    text, note = text.removesuffix(self.tokenizer.eos_token), note | Note.DROPPED_EOS
        elif isinstance(content, str):
            text = content if system is None else f"{system}\n\n{content}"
        else:
            raise ConfigError(
                f"{where} holds chat messages, but no chat template is applied. Use chat_template=True, or texts."
            )
        check_characters(text, where, "prompt")
        return text, note

    def _is_rendered(self, content: str, text: str) -> bool:
        """Return whether a prompt already begins with the special token that begins the chat template's text."""
        opening = next((token for token in self._special_tokens if content.startswith(token)), None)
        return opening is not None and (text.startswith(opening) or opening == self.tokenizer.bos_token)

    def _read_completion(self, row: Row, where: str) -> str:
        column = str(self.format.completion_column)
        text = row[column]
        if not isinstance(text, str):
            raise ConfigError(
                f"{where}: completion_column='{column}' holds {cut_value(text)}. It must be text: correct or remove "
                "the row."
            )
        check_characters(text, where, "completion")
        return text

    def _finish(self, text: str, note: Note, tokens: Tokens, where: str) -> dict[str, object]:
        """Return the columns of a row that are computed from its text."""
        prompt, completion, limit = tokens.prompt, tokens.completion, self.format.max_tokens
        if not prompt and text:
            raise ConfigError(
                f"{where}: the prompt {cut_value(text)} ends within the completion's first token, and nothing before "
                "that could predict it. Remove the row or lengthen its prompt."
            )
        if not prompt:
            raise ConfigError(f"{where}: the prompt is empty. Remove the row or give it a text.")
        num_tokens, is_overlong = len(prompt), len(prompt) > limit
        is_dropped = is_overlong and self.format.overlong == "drop"
        found = {
            Note.DROPPED_BOS: tokens.has_dropped_bos,
            Note.DROPPED_EOS: tokens.has_dropped_eos,
            Note.INSIDE_THOUGHT: find_open_thought(text) is not None,
            Note.EMPTY_COMPLETION: completion is not None and not completion,
        }
        if is_overlong and not is_dropped:
            prompt, tail = cut_prompt(self.tokenizer, prompt, limit)
            text = str(self.tokenizer.decode(prompt if self.is_chat else tail))
        if completion is not None:
            completion = [*completion, self.tokenizer.eos_token_id]
            is_beyond = self.max_length is not None and len(prompt) + len(completion) > self.max_length
            found[Note.BEYOND_POSITIONS] = is_beyond and not is_dropped
        for flag, is_so in found.items():
            note |= flag if is_so else Note(0)
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
    """Encode all rows; return the prompts, their lengths before they are cut, and their notes."""
    prompts: list[Prompt] = []
    lengths: list[int] = []
    notes: list[int] = []
    for start in range(0, len(table.rows), _ROWS_A_BATCH):
        rows = table.rows[start : start + _ROWS_A_BATCH]
        columns = encoder.encode(table, start, start + len(rows))
        for i, row, *values in zip(range(len(rows)), rows, *(columns[name] for name in OF_PROMPT), strict=True):
            prompts.append(Prompt(index=start + i, columns=row, **dict(zip(OF_PROMPT, values, strict=True))))
        lengths += columns["num_tokens"]
        notes += columns["notes"]
    return prompts, lengths, notes


def _is_chat(tokenizer: "Tokenizer", prompt_format: PromptFormat) -> bool:
    if prompt_format.chat_template and not tokenizer.chat_template:
        name = tokenizer.name_or_path
        raise ConfigError(f"chat_template=True, but the tokenizer '{name}' has none. Use chat_template=False.")
    return bool(tokenizer.chat_template) if prompt_format.chat_template is None else prompt_format.chat_template


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
    """Fills templates with texts, numbers and times; other types, such as ``None``, raise an error."""

    def convert_field(self, value: object, conversion: str | None) -> object:
        """Convert a template's field as ``str.format`` does; raise a TypeError if it is no text, number or time."""
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


def _read_content(row: Row, prompt_format: PromptFormat, where: str, *, has_fixed_fields: bool) -> str | list[Message]:
    """Return the text or the chat messages in a row's prompt column, or the text of the filled template."""
    if prompt_format.template is not None:
        return _fill_template(prompt_format.template, row, where)
    content = row[prompt_format.column]
    if isinstance(content, str):
        return content
    if is_chat(content):
        return clean_messages(content, where, has_fixed_fields=has_fixed_fields)
    raise ConfigError(
        f"{where}: column '{prompt_format.column}' holds {cut_value(content)}. Write a text, or a list of messages "
        "with role and content."
    )


def require_columns(table: RowTable, columns: list[str]) -> None:
    """Raise a ConfigError if a row lacks one of the columns; it names the row, or the set if no row has the column."""
    known = table.columns
    for column in [column for column in columns if column not in known]:
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
