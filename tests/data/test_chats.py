"""Chat messages as files have them, and what chat templates make of them."""

from typing import Any

import pytest
from prompt_files import make_tokenizer

from rlightning.data.chats import check_template_arguments, clean_messages, find_open_thought, render_chat
from rlightning.errors import ConfigError

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1, "y": None}}}
TEMPLATE = (
    "{% if enable_thinking is defined and enable_thinking %}/think {% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.tool_calls is defined %}{% for call in m.tool_calls %}{{ call.function.name }}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def clean(*messages: dict[str, Any], has_fixed_fields: bool = False) -> list[dict[str, Any]]:
    return clean_messages(list(messages), "x.jsonl, line 3", has_fixed_fields=has_fixed_fields)


def make_chat_tokenizer(template: str = TEMPLATE) -> Any:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_null_fields_of_messages_are_left_out() -> None:
    assert clean({**USER, "tool_calls": None, "name": None}) == [USER]
    assert clean({**USER, "tool_calls": []}) == [USER]
    called = {"role": "assistant", "content": None, "tool_calls": [{**CALL, "id": None}]}
    assert clean(called) == [{"role": "assistant", "content": "", "tool_calls": [CALL]}]
    # In Parquet every call has the arguments of all others.
    (message,) = clean(called, has_fixed_fields=True)
    assert message["tool_calls"][0]["function"]["arguments"] == {"x": 1}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "hi"}], "hi"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b", "image_url": None}], "a\nb"),
        (["a", {"text": "b"}], "a\nb"),
        ("", ""),
        ([], ""),
    ],
)
def test_content_of_parts_becomes_a_text(content: Any, text: str) -> None:
    assert clean({"role": "user", "content": content}) == [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "user", "content": None}, r"message 2 \('user'\) has no content"),
        ({"role": "assistant", "tool_calls": None}, r"message 2 \('assistant'\) has no content"),
        ({"role": "user", "content": 7}, "message 2 has content=7"),
        ({"role": "user", "content": {"text": "x"}}, "message 2 has content={'text': 'x'}"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "message 2, part 1 is .* Only text"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "message 2, part 1 is"),
        ({"role": "user", "content": [None]}, "message 2, part 1 is None"),
        ({**USER, "tool_calls": "f()"}, r"message 2 has tool_calls='f\(\)'"),
        ({**USER, "tool_calls": [None]}, r"message 2 has tool_calls=\[None\]"),
    ],
)
def test_messages_that_hold_no_text_say_where(message: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"x.jsonl, line 3: {reason}") as caught:
        clean(USER, message)
    assert "\n" not in str(caught.value)


def test_chat_ending_with_assistant_refused_unless_continued() -> None:
    tokenizer = make_chat_tokenizer()
    ended = [USER, {"role": "assistant", "content": "He"}]
    with pytest.raises(ConfigError, match=r"line 3: the chat ends with the assistant.*continue_final_message: true"):
        render_chat(tokenizer, ended, {}, "x.jsonl, line 3")
    arguments = {"continue_final_message": True}
    check_template_arguments(tokenizer, arguments)
    assert render_chat(tokenizer, ended, arguments, "") == "<user>hi<assistant>He"
    assert render_chat(tokenizer, [USER], arguments, "") == "<user>hi<assistant>"


@pytest.mark.parametrize(
    "template", ["{{ messages + 1 }}", "{{ raise_exception('no\nsystem') }}", "{% for x in y.z %}"]
)
def test_whatever_a_template_raises_is_one_line(template: str) -> None:
    with pytest.raises(ConfigError, match="x, line 3: the tokenizer's chat template refuses it: ") as caught:
        render_chat(make_chat_tokenizer(template), [USER], {}, "x, line 3")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"enable_thinkin": True}, r"does not read 'enable_thinkin'\. Did you mean 'enable_thinking'\?"),
        ({"zzz": 1}, r"does not read 'zzz'\. Remove it"),
        ({"tools": []}, "does not read 'tools'"),
        ({"add_generation_prompt": False}, "'add_generation_prompt' is set by the data module"),
        ({"tokenize": True}, "'tokenize' is set by the data module"),
    ],
)
def test_template_arguments_without_effect_are_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_template_arguments(make_chat_tokenizer(), arguments)


@pytest.mark.parametrize(
    ("text", "tag"),
    [
        ("<|assistant|>\n<think>\n", "<think>"),
        ("[THINK]", "[THINK]"),
        ("<|START_THINKING|>", "<|START_THINKING|>"),
        ("<seed:think>", "<seed:think>"),
        ("<think>\n\n</think>\n\n", None),
        ("<|END_THINKING|>", None),
        ("I <think> so", None),
        ("<|assistant|>", None),
        ("", None),
    ],
)
def test_open_thought_at_prompt_end_is_found(text: str, tag: str | None) -> None:
    assert find_open_thought(text) == tag
