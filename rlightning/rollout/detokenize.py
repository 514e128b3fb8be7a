"""From a completion's tokens to its text, once it is whole, by the trainer's tokenizer.

vLLM decodes token by token, which only stop strings need; with log-probabilities it looks up each token's own text
besides. In its Python process this costs several times what all the rest of a token does (docs/performance.md).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlightning.protocols import HasBackend, has

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

CONTEXT_TOKENS = 32
"""Last tokens of the prompt that are decoded too: some tokenizers decode the first token of a text differently."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Character to which bytes are decoded that are not, or not yet, a whole character."""


def decode_completions(
    tokenizer: "Tokenizer", prompt: Sequence[int], completions: Sequence[Sequence[int]]
) -> list[str]:
    """Return the texts of completions, as vLLM would decode them.

    Special tokens and the bytes of a character that the completion's end has cut are left out.

    Args:
        tokenizer: a Hugging Face tokenizer.
        prompt: [P], the tokens before them.
        completions: [C] each.
    """
    context = list(prompt[-CONTEXT_TOKENS:])
    before = decode_tokens(tokenizer, context)
    texts = []
    for token_ids in map(list, completions):
        text = decode_tokens(tokenizer, context + token_ids)
        # A prompt that ends within a character is decoded to something else when that is whole.
        text = text.removeprefix(before) if text.startswith(before) else decode_tokens(tokenizer, token_ids)
        texts.append(text.rstrip(UNFINISHED))
    return texts


def decode_tokens(tokenizer: "Tokenizer", token_ids: list[int]) -> str:
    """Return the text of tokens, without special ones.

    Not by ``tokenizer.decode`` where there is a backend, which may remove spaces in front of punctuation.
    """
    decoder = tokenizer.backend_tokenizer if has(tokenizer, HasBackend) else tokenizer
    return str(decoder.decode(token_ids, skip_special_tokens=True))
