"""From a completion's tokens to its text, once it is whole.

vLLM decodes token by token, which only stop strings need; with log-probabilities it looks up each token's own text
besides. In its Python process this costs several times what all the rest of a token does (docs/performance.md).
"""

from collections.abc import Sequence
from typing import Any

CONTEXT_TOKENS = 32
"""Of the prompt, that are decoded along: some tokenizers write a token otherwise where a text begins."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What bytes are decoded to that are no character, or not yet."""


def can_decode(tokenizer: Any) -> bool:
    """Whether :func:`decode_completions` knows the tokenizer: one of the library ``tokenizers``."""
    return hasattr(tokenizer, "backend_tokenizer")


def decode_completions(tokenizer: Any, prompt: Sequence[int], completions: Sequence[Sequence[int]]) -> list[str]:
    """Return the texts of completions, as vLLM decodes them.

    Special tokens and the bytes of a character that the completion's end has cut are left out.

    Args:
        tokenizer: a Hugging Face tokenizer.
        prompt: [P], the tokens before them.
        completions: [C] each.
    """
    backend = tokenizer.backend_tokenizer
    context = list(prompt[-CONTEXT_TOKENS:])
    before = backend.decode(context, skip_special_tokens=True)
    texts = []
    for token_ids in map(list, completions):
        text = backend.decode(context + token_ids, skip_special_tokens=True)
        # A prompt that ends within a character is decoded to something else when that is whole.
        if text.startswith(before):
            text = text.removeprefix(before)
        else:
            text = backend.decode(token_ids, skip_special_tokens=True)
        texts.append(text.rstrip(UNFINISHED))
    return texts
