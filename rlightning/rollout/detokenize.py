"""Converts the tokens of finished completions to text, by the trainer's tokenizer.

vLLM decodes token by token, which only stop strings need, and with log-probabilities looks up the text of each token.
In vLLM's Python process this takes several times as long as all other work for a token (docs/performance.md).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlightning.protocols import HasBackend, has

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

CONTEXT_TOKENS = 32
"""Number of the prompt's last tokens that are decoded too: some tokenizers decode a text's first token differently."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""The replacement character, to which the bytes of an incomplete character are decoded."""


def decode_completions(
    tokenizer: "Tokenizer", prompt: Sequence[int], completions: Sequence[Sequence[int]]
) -> list[str]:
    """Return the texts of completions, as vLLM would decode them.

    Special tokens, and the bytes of an incomplete last character, are left out.

    Args:
        tokenizer: a Hugging Face tokenizer.
        prompt: [P] tokens before the completions.
        completions: the tokens of each completion.
    """
    context = list(prompt[-CONTEXT_TOKENS:])
    before, *wholes = decode_all(tokenizer, [context, *(context + list(token_ids) for token_ids in completions)])
    texts = []
    for token_ids, whole in zip(completions, wholes, strict=True):
        # A prompt that ends within a character is decoded differently once the character is complete.
        text = whole.removeprefix(before) if whole.startswith(before) else decode_tokens(tokenizer, list(token_ids))
        texts.append(text.rstrip(UNFINISHED))
    return texts


def decode_all(tokenizer: "Tokenizer", sequences: list[list[int]]) -> list[str]:
    """Return the texts of token sequences, as :func:`decode_tokens` decodes each.

    A Rust backend decodes them in parallel, and meanwhile lets Python's other threads run.
    """
    if has(tokenizer, HasBackend):
        return list(tokenizer.backend_tokenizer.decode_batch(sequences, skip_special_tokens=True))
    return [decode_tokens(tokenizer, token_ids) for token_ids in sequences]


def decode_tokens(tokenizer: "Tokenizer", token_ids: list[int]) -> str:
    """Return the text of tokens, without special tokens.

    Uses the tokenizer's Rust backend if it has one: ``tokenizer.decode`` may remove spaces before punctuation.
    """
    decoder = tokenizer.backend_tokenizer if has(tokenizer, HasBackend) else tokenizer
    return str(decoder.decode(token_ids, skip_special_tokens=True))
