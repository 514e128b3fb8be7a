"""A small tokenizer and prompt files for the data tests."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, so that lengths can be read off a text; no chat template."""
    alphabet = [chr(code) for code in range(32, 127)] + ["\n"]
    model = models.WordLevel({character: i for i, character in enumerate(alphabet)}, unk_token=" ")
    characters = Tokenizer(model)
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=characters)


def make_metaspace_tokenizer(*, adds_eos: bool = False, way: str = "metaspace") -> PreTrainedTokenizerFast:
    """In SentencePiece's way: a text begins with a space, ``▁T`` is another token than ``T``, and BOS is added.

    Args:
        adds_eos: whether EOS is added too.
        way: how the space gets there, by a pre-tokenizer or by a "normalizer".
    """
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", "▁", "A", ":", "T", "▁A", "▁T"])}
    pieces = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "A"), ("▁", "T")]))
    if way == "metaspace":
        pieces.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    else:
        pieces.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pieces.decoder = decoders.Metaspace()
    template = "<s> $A </s>" if adds_eos else "<s> $A"
    pieces.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=pieces, bos_token="<s>", eos_token="</s>")


def make_byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, after GPT-2's way; EOS is token 0, and there is no BOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": 0, **{byte: i + 1 for i, byte in enumerate(alphabet)}}
    pieces = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.post_processor = processors.ByteLevel(trim_offsets=True)
    pieces.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="<eos>")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write ``rows`` as JSON lines; gives the path as a string."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
