"""Templates, chats, and the limit on lengths. The tokenizer has one token a character."""

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from prompt_files import make_byte_tokenizer, make_metaspace_tokenizer, make_tokenizer, write_rows
from tokenizers import processors

from rlightning.data.formatting import PromptFormat, build_prompts
from rlightning.data.sources import read_rows
from rlightning.errors import ConfigError
from rlightning.types import Prompt

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MESSAGES = [{"role": "user", "content": "hi"}]


LEARNS = "completion"

Build = Callable[..., Sequence[Prompt]]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    def build(rows: list[dict[str, Any]], tokenizer: Any = None, **options: Any) -> Sequence[Prompt]:
        table = read_rows(write_rows(tmp_path / "train.jsonl", rows))
        model = {name: options.pop(name, None) for name in ("vocab_size", "max_length")}
        return build_prompts(table, tokenizer or make_tokenizer(), PromptFormat(**options), **model)

    return build


@pytest.fixture
def text_of(build: Build) -> Callable[..., str]:
    """The text of a single row's prompt, whose tokenizer has one token a character."""

    def text_of(row: dict[str, Any], own_template: str | None = None, **options: Any) -> str:
        tokenizer = make_tokenizer()
        tokenizer.chat_template = own_template
        (prompt,) = build([row], tokenizer, **options)
        assert prompt.columns == row and len(prompt.token_ids) == len(prompt.text)
        return prompt.text

    return text_of


def test_plain_text_template_and_system_prompt(text_of: Callable[..., str]) -> None:
    row = {"prompt": "abc", "question": "1+1?"}
    assert text_of(row) == "abc"
    assert text_of(row, column="question") == "1+1?"
    assert text_of(row, template="Q: {question}\nA:") == "Q: 1+1?\nA:"
    assert text_of(row, system="Be.") == "Be.\n\nabc"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{a}{b:03d} {c:.2f} {d} {e[0]}{e[1][f]}{{}}", "x007 0.50 True uv{}"),
        ("{a!s}", "x"),
        ("{a!r}", "'x'"),
        ("{b!s:>3}", "  7"),
    ],
)
def test_template_takes_texts_numbers_and_parts(template: str, text: str, text_of: Callable[..., str]) -> None:
    row = {"a": "x", "b": 7, "c": 0.5, "d": True, "e": ["u", {"f": "v"}]}
    assert text_of(row, template=template) == text


def test_token_ids_are_those_of_the_text(build: Build) -> None:
    (prompt,) = build([{"prompt": "abc"}])
    assert str(make_tokenizer().decode(prompt.token_ids)).replace(" ", "") == "abc"


def test_chat_template_is_applied_unless_turned_off(text_of: Callable[..., str]) -> None:
    chat = {"prompt": MESSAGES}
    own_system = {"prompt": [{"role": "system", "content": "Own."}, *MESSAGES]}
    assert text_of({"prompt": "hi"}, CHAT_TEMPLATE) == text_of(chat, CHAT_TEMPLATE) == "<|user|>hi<|assistant|>"
    assert text_of(chat, CHAT_TEMPLATE, system="Be.") == "<|system|>Be.<|user|>hi<|assistant|>"
    assert text_of(own_system, CHAT_TEMPLATE, system="Be.") == "<|system|>Own.<|user|>hi<|assistant|>"
    assert text_of({"prompt": "hi"}, CHAT_TEMPLATE, chat_template=False) == "hi"
    assert text_of({"prompt": "hi"}, "{{ greeting }}", chat_template_arguments={"greeting": "hello"}) == "hello"


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
        ([{"q": "x"}, {"q": None}], {"template": "Q {q}"}, r"line 2: prompt_template='Q \{q\}' .* write None into the"),
        ([{"q": ["a"]}], {"template": "Q {q}"}, r"line 1: .* it would write \['a'\] into the prompt, where texts and"),
        ([{"q": {"a": 1}}], {"template": "Q {q}"}, r"line 1: .* would write \{'a': 1\} into .*Correct or remove the"),
        ([{"q": None}], {"template": "Q {q!s}"}, r"line 1: .* it would write None into the prompt"),
        ([{"q": [1]}], {"template": "Q {q!a}"}, r"line 1: .* it would write \[1\] into the prompt"),
        ([{"q": [1]}], {"template": "Q {q!r:>9}"}, r"line 1: .* it would write \[1\] into the prompt"),
        ([{"q": {"a": None}}], {"template": "Q {q[a]:>4}"}, r"line 1: .* it would write None into the prompt"),
        ([{"q": float("nan")}], {"template": "Q {q}"}, r"line 1: .* it would write nan into the prompt"),
        ([{"q": [1]}], {"template": "Q {q[1]}"}, r"line 1: .* cannot be filled: IndexError: list index out of range"),
        ([{"prompt": "x"}, {"prompt": None}], {}, r"line 2: column 'prompt' holds None\. Write a text, or a list"),
        ([{"prompt": [{"content": "x"}]}], {}, r"line 1: column 'prompt' holds \[\{'content': 'x'\}\]"),
        ([{"prompt": MESSAGES}], {}, "line 1 holds chat messages, but no chat template is applied"),
        ([{"prompt": "x"}, {"prompt": ""}], {}, "line 2: the prompt is empty"),
        ([{"prompt": "a\ud83d"}], {}, r"line 1: the prompt holds the lone surrogate U\+D83D at character 2"),
        ([{"prompt": "x", "q": "\ud83d"}], {"template": "{q}"}, "line 1: the prompt holds the lone surrogate"),
        ([{"prompt": "x"}], {"chat_template_arguments": {"a": 1}}, "have no effect: no chat template is applied"),
        ([{"prompt": "x"}], {"completion_column": "completion"}, "no end-of-sequence token to end a completion"),
        ([{"prompt": "x"}], {"chat_template": True}, "chat_template=True, but the tokenizer '.*' has none"),
    ],
)
def test_mistakes_are_one_line_and_say_where(
    build: Build, rows: list[dict[str, Any]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build(rows, **options)
    assert "\n" not in str(caught.value)


def test_a_message_that_the_chat_template_refuses(text_of: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match="line 1: the tokenizer's chat template refuses it: no system role"):
        text_of({"prompt": "x"}, "{{ raise_exception('no system role') }}")


def test_overlong_prompts_are_dropped_or_cut_and_said(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, rows = tmp_path / "train.jsonl", [{"prompt": text} for text in ("abc", "abcdefgh", "abcde", "abcd")]
    with caplog.at_level(logging.WARNING):
        kept = build(rows, max_tokens=4)
    assert [prompt.index for prompt in kept] == [0, 3]
    assert [record.message for record in caplog.records if record.name.startswith("rlightning")] == [
        f"2 of 4 prompts of '{path}' have more than max_prompt_tokens=4 tokens and are dropped; "
        f"the longest, {path}, line 2, has 8."
    ]
    caplog.clear()
    cut = build(rows, max_tokens=4, overlong="truncate")
    assert [prompt.index for prompt in cut] == [0, 1, 2, 3]
    assert [len(prompt.token_ids) for prompt in cut] == [3, 4, 4, 4]
    assert cut[1].text.replace(" ", "") == "efgh"
    assert "keep their last 4" in caplog.text


def test_nothing_left_is_an_error(build: Build) -> None:
    with pytest.raises(ConfigError, match=r"All 1 of 1 prompts .* Raise max_prompt_tokens, or use overlong='truncate'"):
        build([{"prompt": "abcde"}], max_tokens=4)


def test_already_rendered_prompt_is_not_rendered_again(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = make_metaspace_tokenizer(adds_eos=True)
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}A{{ m.content }}{% endfor %}:"
    path = tmp_path / "train.jsonl"
    with caplog.at_level(logging.INFO):
        first, second = build([{"prompt": "T"}, {"prompt": "<s>AT:</s>"}], tokenizer)
    assert first.text == second.text == "<s>AT:"
    assert first.token_ids == second.token_ids
    said = [record.message for record in caplog.records if "rendered before" in record.message]
    assert len(said) == 1
    assert said[0].startswith(f"1 of 2 prompts of '{path}' begin with") and f"(first: {path}, line 2)" in said[0]


def test_what_is_left_out_of_prompts_is_said_once(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": "<s>A:"}, {"prompt": "<s>T:"}, {"prompt": "T"}]
    with caplog.at_level(logging.INFO):
        prompts = build(rows, make_metaspace_tokenizer(adds_eos=True))
    assert [prompt.token_ids for prompt in prompts] == [[0, 3, 4], [0, 5, 4], [0, 7]]
    said = [record.message for record in caplog.records]
    assert [message.split(" of ")[0] for message in said if "beginning-of-sequence" in message] == ["2"]
    assert [message.split(" of ")[0] for message in said if "end-of-sequence" in message] == ["3"]


def test_cut_prompts_keep_their_bos(build: Build) -> None:
    (prompt,) = build([{"prompt": "A:A:T"}], make_metaspace_tokenizer(), max_tokens=3, overlong="truncate")
    assert prompt.token_ids == [0, 4, 5]
    assert prompt.text == ":T"


def test_prompts_that_open_a_thought_are_said_once(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer, path = make_tokenizer(), tmp_path / "train.jsonl"
    tokenizer.chat_template = CHAT_TEMPLATE + "<think>\n"
    with caplog.at_level(logging.INFO):
        build([{"prompt": "a"}, {"prompt": "b"}], tokenizer)
    (message,) = [record.message for record in caplog.records if "thought" in record.message]
    assert message.startswith(f"2 of 2 prompts of '{path}' end with the tag that opens the model's thought")
    assert "full_text" in message


@pytest.mark.parametrize(
    ("completion", "message"),
    [
        (None, "line 3: completion_column='completion' holds None. It must be text"),
        (7, "line 3: completion_column='completion' holds 7. It must be text"),
        ([{"role": "assistant", "content": "x"}], r"line 3: completion_column='completion' holds \[\{'role"),
        ("\udc00", r"line 3: the completion holds the lone surrogate U\+DC00"),
        ("x" * 9, "line 3: prompt and completion have more tokens than the model's 10 positions, as in 1 of 3 rows"),
    ],
)
def test_completions_that_cannot_be_learned_say_where(build: Build, completion: Any, message: str) -> None:
    good = {"prompt": "a", "completion": "b"}
    rows = [good, good, {"prompt": "a", "completion": completion}]
    with pytest.raises(ConfigError, match=message) as caught:
        build(rows, make_byte_tokenizer(), completion_column=LEARNS, max_length=10)
    assert "\n" not in str(caught.value)


def test_completions_end_with_one_eos(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rows = [{"prompt": "A:", "completion": text} for text in ("T", "T</s>", "", "</s>")]
    prompts = build(rows, make_metaspace_tokenizer(adds_eos=True), completion_column=LEARNS)
    assert [prompt.token_ids for prompt in prompts] == [[0, 6, 4]] * 4
    assert [prompt.completion_ids for prompt in prompts] == [[5, 1], [5, 1], [1], [1]]
    assert "2 of 4 prompts of" in caplog.text
    assert re.search(r"have an empty completion: .* end-of-sequence token alone \(first: .*, line 3\)", caplog.text)


@pytest.mark.parametrize("column", ["prompt", "completion"])
def test_a_token_beyond_the_embedding_says_where(build: Build, column: str) -> None:
    good = {"prompt": "A", "completion": "A"}  # tokens 1 to 94 are the characters from ! to ~, so that B is 34
    rows = [good, {**good, column: "AB"}]
    with pytest.raises(ConfigError, match=r"line 2: its token 34 \('B'\) is beyond the model's embedding of 34 tokens"):
        build(rows, make_byte_tokenizer(), completion_column=LEARNS, vocab_size=34)


def test_completion_without_a_prompt_needs_a_bos(build: Build) -> None:
    rows = [{"prompt": "A", "completion": "T"}, {"prompt": "", "completion": "T"}]
    with pytest.raises(ConfigError, match=r"line 2: the prompt is empty\. Remove the row or give it a text\."):
        build(rows, make_byte_tokenizer(), completion_column=LEARNS)
    prompts = build(rows, make_metaspace_tokenizer(), completion_column=LEARNS)
    # <s> ▁A T </s>, and <s> ▁T </s>
    assert [(prompt.token_ids, prompt.completion_ids) for prompt in prompts] == [([0, 6], [5, 1]), ([0], [7, 1])]


def test_prompt_ending_within_a_token_is_refused(build: Build) -> None:
    tokenizer = make_metaspace_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A")
    with pytest.raises(ConfigError, match=r"line 1: the prompt ' ' ends within the completion's first token"):
        build([{"prompt": " ", "completion": "T"}], tokenizer, completion_column=LEARNS)
