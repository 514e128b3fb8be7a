"""Templates, chats, and the limit on lengths. The tokenizer has one token a character."""

import logging
from pathlib import Path
from typing import Any

import pytest
from prompt_files import make_tokenizer, write_rows
from transformers import PreTrainedTokenizerFast

from rlightning.data.formatting import PromptFormat, build_prompts
from rlightning.data.sources import read_rows
from rlightning.errors import ConfigError

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def build(path: str, tokenizer: Any, **options: Any) -> list[tuple[str, int]]:
    prompts = build_prompts(read_rows(path), tokenizer, PromptFormat(**options))
    return [(prompt.text, len(prompt.token_ids)) for prompt in prompts]


def test_plain_text_template_and_system_prompt(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "train.jsonl", [{"prompt": "abc", "question": "1+1?"}])
    assert build(path, tokenizer) == [("abc", 3)]
    assert build(path, tokenizer, column="question") == [("1+1?", 4)]
    assert build(path, tokenizer, template="Q: {question}\nA:") == [("Q: 1+1?\nA:", 10)]
    assert build(path, tokenizer, system="Be.") == [("Be.\n\nabc", 8)]


def test_the_row_is_kept_as_columns(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    row = {"prompt": "abc", "answer": 2}
    (prompt,) = build_prompts(read_rows(write_rows(tmp_path / "train.jsonl", [row])), tokenizer, PromptFormat())
    assert prompt.columns == row
    assert str(tokenizer.decode(prompt.token_ids)).replace(" ", "") == "abc"


def test_chat_template(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.chat_template = CHAT_TEMPLATE
    text = write_rows(tmp_path / "text.jsonl", [{"prompt": "hi"}])
    chat = write_rows(tmp_path / "chat.jsonl", [{"prompt": MESSAGES}])
    own_system = write_rows(tmp_path / "own.jsonl", [{"prompt": [{"role": "system", "content": "Own."}, *MESSAGES]}])
    assert build(text, tokenizer)[0][0] == build(chat, tokenizer)[0][0] == "<|user|>hi<|assistant|>"
    assert build(chat, tokenizer, system="Be.")[0][0] == "<|system|>Be.<|user|>hi<|assistant|>"
    assert build(own_system, tokenizer, system="Be.")[0][0] == "<|system|>Own.<|user|>hi<|assistant|>"
    assert build(text, tokenizer, chat_template=False)[0][0] == "hi"
    tokenizer.chat_template = "{{ greeting }}"
    assert build(text, tokenizer, chat_template_arguments={"greeting": "hello"}) == [("hello", 5)]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"promt": "x"}], {}, r"train\.jsonl' has no column 'prompt'\. Did you mean 'promt'\?"),
        ([{"prompt": "x"}, {"text": "x"}], {}, r"train\.jsonl, line 2 has no column 'prompt', which other rows have"),
        ([{"question": "x"}], {"template": "{qestion}"}, r"no column 'qestion'\. Did you mean 'question'\?"),
        ([{"prompt": "x"}], {"template": "{prompt"}, "is no format string: expected '}'"),
        ([{"prompt": "x"}], {"template": "Q: {}"}, "must name columns in its braces"),
        ([{"prompt": "x"}], {"template": "no column"}, "must name columns in its braces"),
        ([{"prompt": "x"}], {"template": "{prompt:d}"}, r"line 1: prompt_template='\{prompt:d\}' cannot be filled"),
        ([{"prompt": "x"}, {"prompt": None}], {}, r"line 2: column 'prompt' holds None\. Write a text, or a list"),
        ([{"prompt": [{"content": "x"}]}], {}, r"line 1: column 'prompt' holds \[\{'content': 'x'\}\]"),
        ([{"prompt": MESSAGES}], {}, "line 1 holds chat messages, but no chat template is applied"),
        ([{"prompt": "x"}, {"prompt": ""}], {}, "line 2: the prompt is empty"),
        ([{"prompt": "x"}], {"chat_template": True}, "chat_template=True, but the tokenizer '.*' has none"),
    ],
)
def test_mistakes_are_one_line_and_say_where(
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    rows: list[dict[str, Any]],
    options: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build(write_rows(tmp_path / "train.jsonl", rows), tokenizer, **options)
    assert "\n" not in str(caught.value)


def test_a_message_that_the_chat_template_refuses(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(ConfigError, match="line 1: the tokenizer's chat template refuses it: no system role"):
        build(write_rows(tmp_path / "train.jsonl", [{"prompt": "x"}]), tokenizer)


def test_overlong_prompts_are_dropped_or_cut_and_said(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_rows(
        tmp_path / "train.jsonl", [{"prompt": "abc"}, {"prompt": "abcdefgh"}, {"prompt": "abcde"}, {"prompt": "abcd"}]
    )
    with caplog.at_level(logging.WARNING):
        kept = build_prompts(read_rows(path), tokenizer, PromptFormat(max_tokens=4))
    assert [prompt.index for prompt in kept] == [0, 3]
    assert [record.message for record in caplog.records if record.name.startswith("rlightning")] == [
        f"2 of 4 prompts of '{path}' have more than max_prompt_tokens=4 tokens and are dropped; "
        f"the longest, {path}, line 2, has 8."
    ]
    caplog.clear()
    cut = build_prompts(read_rows(path), tokenizer, PromptFormat(max_tokens=4, overlong="truncate"))
    assert [prompt.index for prompt in cut] == [0, 1, 2, 3]
    assert [len(prompt.token_ids) for prompt in cut] == [3, 4, 4, 4]
    assert cut[1].text.replace(" ", "") == "efgh"
    assert "keep their last 4" in caplog.text


def test_nothing_left_is_an_error(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "train.jsonl", [{"prompt": "abcde"}])
    with pytest.raises(ConfigError, match=r"All 1 of 1 prompts .* Raise max_prompt_tokens, or use overlong='truncate'"):
        build(path, tokenizer, max_tokens=4)
