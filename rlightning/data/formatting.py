"""From rows to prompts: template, chat template, tokens, and the limit on their length."""

import logging
import string
from dataclasses import dataclass, field
from typing import Any, Literal

from rlightning.data.sources import Row, RowTable
from rlightning.errors import ConfigError, did_you_mean
from rlightning.types import Prompt

logger = logging.getLogger(__name__)

Message = dict[str, Any]


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
    """

    column: str = "prompt"
    template: str | None = None
    system: str | None = None
    chat_template: bool | None = None
    chat_template_arguments: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 1024
    overlong: Literal["drop", "truncate"] = "drop"


def build_prompts(table: RowTable, tokenizer: Any, prompt_format: PromptFormat) -> list[Prompt]:
    """Render and tokenise every row; count, say and drop or cut those that are too long.

    Args:
        table: the rows.
        tokenizer: a Hugging Face tokenizer.
        prompt_format: how.

    Returns:
        At least one prompt, each of 1 to ``prompt_format.max_tokens`` tokens, in the order of the rows.
    """
    is_chat = _is_chat(tokenizer, prompt_format)
    contents = _read_contents(table, prompt_format)
    if is_chat:
        chats = [_to_messages(content, prompt_format.system) for content in contents]
        texts = [_render_chat(tokenizer, chat, prompt_format, table.where(i)) for i, chat in enumerate(chats)]
    else:
        texts = [_to_plain(content, prompt_format.system, table.where(i)) for i, content in enumerate(contents)]
    # The chat template writes the special tokens itself.
    encoded = tokenizer(texts, add_special_tokens=not is_chat, return_attention_mask=False, verbose=False)["input_ids"]
    prompts = [
        Prompt(index, text, list(ids), row)
        for index, (text, ids, row) in enumerate(zip(texts, encoded, table.rows, strict=True))
    ]
    for prompt in prompts:
        if not prompt.token_ids:
            raise ConfigError(f"{table.where(prompt.index)}: the prompt is empty. Remove the row or give it a text.")
    return _limit_lengths(prompts, table, tokenizer, prompt_format)


def _is_chat(tokenizer: Any, prompt_format: PromptFormat) -> bool:
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if prompt_format.chat_template and not has_template:
        name = getattr(tokenizer, "name_or_path", "")
        raise ConfigError(f"chat_template=True, but the tokenizer '{name}' has none. Use chat_template=False.")
    return has_template if prompt_format.chat_template is None else prompt_format.chat_template


def _read_contents(table: RowTable, prompt_format: PromptFormat) -> list[str | list[Message]]:
    if prompt_format.template is None:
        _require_columns(table, [prompt_format.column])
        return [
            _check_content(row[prompt_format.column], prompt_format.column, table, i)
            for i, row in enumerate(table.rows)
        ]
    template = prompt_format.template
    _require_columns(table, _template_columns(template))
    return [_fill_template(template, row, table.where(i)) for i, row in enumerate(table.rows)]


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


def _fill_template(template: str, row: Row, where: str) -> str:
    try:
        return template.format_map(row)
    except (ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{where}: prompt_template={template!r} cannot be filled: {error!r}. Mend the row."
        ) from error


def _require_columns(table: RowTable, columns: list[str]) -> None:
    for column in columns:
        missing = [i for i, row in enumerate(table.rows) if column not in row]
        if len(missing) == len(table.rows):
            raise ConfigError(f"'{table.path}' has no column '{column}'. {did_you_mean(column, table.rows[0])}")
        if missing:
            raise ConfigError(
                f"{table.where(missing[0])} has no column '{column}', which other rows have. "
                f"{did_you_mean(column, table.rows[missing[0]])}"
            )


def _check_content(content: Any, column: str, table: RowTable, row: int) -> str | list[Message]:
    if isinstance(content, str):
        return content
    is_chat = isinstance(content, list) and bool(content)
    if is_chat and all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in content):
        messages: list[Message] = content
        return messages
    shown = repr(content) if len(repr(content)) <= 60 else repr(content)[:57] + "..."
    rule = "Write a text, or a list of messages with role and content"
    raise ConfigError(f"{table.where(row)}: column '{column}' holds {shown}. {rule}.")


def _to_messages(content: str | list[Message], system: str | None) -> list[Message]:
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if system is None or messages[0]["role"] == "system":  # a row's own system message comes first
        return messages
    return [{"role": "system", "content": system}, *messages]


def _render_chat(tokenizer: Any, messages: list[Message], prompt_format: PromptFormat, where: str) -> str:
    import jinja2

    try:
        text: str = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **prompt_format.chat_template_arguments
        )
    except jinja2.TemplateError as error:
        raise ConfigError(f"{where}: the tokenizer's chat template refuses it: {error}. Mend the messages.") from error
    return text


def _to_plain(content: str | list[Message], system: str | None, where: str) -> str:
    if not isinstance(content, str):
        raise ConfigError(
            f"{where} holds chat messages, but no chat template is applied. Use chat_template=True, or texts."
        )
    return content if system is None else f"{system}\n\n{content}"


def _limit_lengths(prompts: list[Prompt], table: RowTable, tokenizer: Any, prompt_format: PromptFormat) -> list[Prompt]:
    limit = prompt_format.max_tokens
    overlong = [prompt for prompt in prompts if len(prompt.token_ids) > limit]
    if not overlong:
        return prompts
    longest = max(overlong, key=lambda prompt: len(prompt.token_ids))
    count = (
        f"{len(overlong)} of {len(prompts)} prompts of '{table.path}' have more than max_prompt_tokens={limit} tokens"
    )
    place = f"the longest, {table.where(longest.index)}, has {len(longest.token_ids)}"
    if prompt_format.overlong == "truncate":
        logger.warning("%s and keep their last %d; %s.", count, limit, place)
        return [_cut(prompt, limit, tokenizer) for prompt in prompts]
    if len(overlong) == len(prompts):
        raise ConfigError(f"All {count}; {place}. Raise max_prompt_tokens, or use overlong='truncate'.")
    logger.warning("%s and are dropped; %s.", count, place)
    return [prompt for prompt in prompts if len(prompt.token_ids) <= limit]


def _cut(prompt: Prompt, limit: int, tokenizer: Any) -> Prompt:
    """Keep the end of a prompt: the question's last words and the turn of the model stand there."""
    if len(prompt.token_ids) <= limit:
        return prompt
    token_ids = prompt.token_ids[-limit:]
    return Prompt(prompt.index, tokenizer.decode(token_ids), token_ids, prompt.columns)
