"""Tokenises texts, correctly at the boundaries of special tokens, prompt and completion."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rlightning.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


class Tokens(NamedTuple):
    """The tokens of one row.

    Attributes:
        prompt: [P].
        completion: [C] without an end-of-sequence token; None without a completion.
        has_dropped_bos: whether a second beginning-of-sequence token was removed.
        has_dropped_eos: whether an end-of-sequence token after the prompt was removed.
    """

    prompt: list[int]
    completion: list[int] | None
    has_dropped_bos: bool
    has_dropped_eos: bool


def tokenize(
    tokenizer: "Tokenizer",
    prompts: Sequence[str],
    completions: Sequence[str] | None,
    *,
    has_special_tokens: bool,
) -> list[Tokens]:
    """Return the token ids of each prompt and completion, tokenised together as one text and then split.

    Tokenised separately, a completion would begin like a new text: in SentencePiece with ``▁T`` for ``T``. A token that
    begins in the prompt and ends in the completion belongs to the completion. A prompt may have no tokens then. With
    ``has_special_tokens`` the texts contain their special tokens already, from a chat template.
    """
    pairs = _encode(tokenizer, prompts, completions, add_special_tokens=not has_special_tokens)
    has_completion = completions is not None
    return [
        _trim(tokenizer, ids, border, keeps_eos=has_special_tokens, has_completion=has_completion)
        for ids, border in pairs
    ]


def cut_prompt(tokenizer: "Tokenizer", token_ids: list[int], limit: int) -> tuple[list[int], list[int]]:
    """Truncate a prompt at its beginning, since its end has the question and the turn's start; keep a BOS token.

    Returns the kept tokens, at most ``limit``, and the kept tokens without the BOS token.
    """
    head = token_ids[:1] if token_ids[0] == tokenizer.bos_token_id else []
    tail = token_ids[len(token_ids) - max(limit - len(head), 0) :]
    return head + tail, tail


def check_characters(text: str, where: str, what: str) -> None:
    """Raise a ConfigError for a text with an unpaired surrogate, which no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = f"U+{ord(text[error.start]):04X}"
        raise ConfigError(
            f"{where}: the {what} holds the lone surrogate {code} at character {error.start + 1}, half of a character. "
            "Remove it, or write the whole character."
        ) from error


def _encode(
    tokenizer: "Tokenizer", prompts: Sequence[str], completions: Sequence[str] | None, *, add_special_tokens: bool
) -> list[tuple[list[int], int]]:
    """Return the token ids of each text, and how many of them belong to the prompt."""
    options: dict[str, Any] = {
        "add_special_tokens": add_special_tokens,
        "return_attention_mask": False,
        "verbose": False,
    }
    if completions is None:
        return [(list(ids), len(ids)) for ids in tokenizer(list(prompts), **options)["input_ids"]]
    wholes = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    if tokenizer.is_fast:
        encoded = tokenizer(wholes, return_offsets_mapping=True, **options)
        rows = zip(encoded["input_ids"], encoded["offset_mapping"], prompts, strict=True)
        return [
            (list(ids), next((i for i, (_, end) in enumerate(offsets) if end > len(prompt)), len(ids)))
            for ids, offsets, prompt in rows
        ]
    # Without offsets: the tokens that the prompt alone and the prompt with a continuation have in common.
    alone, together = tokenizer(list(prompts), **options)["input_ids"], tokenizer(wholes, **options)["input_ids"]
    return [(list(ids), _common_length(ids, before)) for ids, before in zip(together, alone, strict=True)]


def _common_length(left: Sequence[int], right: Sequence[int]) -> int:
    differing = (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(differing, min(len(left), len(right)))


def _trim(tokenizer: "Tokenizer", ids: list[int], border: int, *, keeps_eos: bool, has_completion: bool) -> Tokens:
    """Remove all but one leading BOS token, and EOS tokens after the prompt and the completion."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    prompt, completion = ids[:border], ids[border:]
    while has_completion and completion and completion[-1] == eos:
        completion.pop()
    first = 0
    while bos is not None and len(prompt) > first + 1 and prompt[first] == prompt[first + 1] == bos:
        first += 1
    length = len(prompt)
    while not keeps_eos and length > first + 1 and prompt[length - 1] == eos:
        length -= 1
    return Tokens(prompt[first:length], completion if has_completion else None, first > 0, length < len(prompt))
