"""Texts of whole completions against those of the decoder that vLLM runs token by token."""

from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from rlightning.rollout.detokenize import decode_completions


def byte_level() -> Any:
    """As Qwen and Llama 3 have it: tokens are bytes, some of them merged, a character may take several."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa", "Ġb"]
    vocab = {token: i for i, token in enumerate(["<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "a"), ("Ġ", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def sentence_piece() -> Any:
    """As Llama 2 and Mistral have it: a space where a text begins is not written."""
    pieces = ["<unk>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "é", "▁a", "▁b"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "b")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")


def decode_by_token(tokenizer: Any, prompt: list[int], token_ids: list[int]) -> str:
    """Return the text that vLLM decodes, token by token."""
    stream = decoders.DecodeStream(ids=prompt, skip_special_tokens=True)
    return "".join(stream.step(tokenizer.backend_tokenizer, token) or "" for token in token_ids)


@pytest.mark.parametrize("make_tokenizer", [byte_level, sentence_piece])
def test_texts_are_those_of_decoding_token_by_token(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer()
    random = np.random.default_rng(0)
    words = ["a b", " a", "b é", " ", "ab\n", "🙂", "日本", "", "é"]
    prompt: list[int] = tokenizer("".join(random.choice(words, 60)) + "a", add_special_tokens=False).input_ids
    assert len(prompt) > 32
    completions: list[list[int]] = []
    for _ in range(200):
        token_ids = tokenizer("".join(random.choice(words, random.integers(0, 8))), add_special_tokens=False).input_ids
        eos = [tokenizer.eos_token_id] * int(random.integers(0, 2))  # one in the middle is left out as well
        completions.append(token_ids[: len(token_ids) // 2] + eos + token_ids[len(token_ids) // 2 :])
    expected = [decode_by_token(tokenizer, prompt, one) for one in completions]
    assert decode_completions(tokenizer, prompt, completions) == expected
    assert len(set(expected)) > 100 and any(text.startswith(" ") for text in expected)


def test_character_cut_by_completion_end_is_omitted() -> None:
    tokenizer = byte_level()
    smile = tokenizer("a🙂", add_special_tokens=False).input_ids
    assert len(smile) == 5
    cut = [smile[:length] for length in range(1, 6)]
    assert decode_completions(tokenizer, [], cut) == ["a", "a", "a", "a", "a🙂"]


def test_prompt_ending_within_character_is_excluded_from_text() -> None:
    tokenizer = byte_level()
    euro = tokenizer("what? €", add_special_tokens=False).input_ids
    rest = tokenizer(" a", add_special_tokens=False).input_ids
    for cut in (1, 2):
        (text,) = decode_completions(tokenizer, euro[:-cut], [[*euro[-cut:], *rest]])
        assert "what" not in text and text.endswith(" a")


def test_tokenizer_without_backend_decodes_by_itself() -> None:
    tokenizer = ByT5Tokenizer()
    assert not hasattr(tokenizer, "backend_tokenizer")
    a, b, end = ord("a") + 3, ord("b") + 3, tokenizer.eos_token_id  # three special tokens come before the bytes
    assert decode_completions(tokenizer, [b], [[a, b, end], [a, end, b]]) == ["ab", "ab"]
