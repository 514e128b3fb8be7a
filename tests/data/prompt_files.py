"""A small tokenizer and prompt files for the data tests."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, so that lengths can be read off a text; no chat template."""
    alphabet = [chr(code) for code in range(32, 127)] + ["\n"]
    model = models.WordLevel({character: i for i, character in enumerate(alphabet)}, unk_token=" ")
    characters = Tokenizer(model)
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=characters)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write ``rows`` as JSON lines; gives the path as a string."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
