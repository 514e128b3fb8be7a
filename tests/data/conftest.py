"""A small tokenizer and prompt files for the data tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character: lengths can be read off a text. No chat template."""
    alphabet = [chr(code) for code in range(32, 127)] + ["\n"]
    model = models.WordLevel({character: i for i, character in enumerate(alphabet)}, unk_token=" ")
    characters = Tokenizer(model)
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=characters)  # type: ignore[no-untyped-call]


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., str]:
    """Writes rows as JSON lines and gives the path."""

    def write(rows: list[dict[str, Any]], name: str = "train.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write
