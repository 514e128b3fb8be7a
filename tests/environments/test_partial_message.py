"""What is certain of a turn before it is whole: a beginning of what it says then."""

from collections.abc import Sequence

import pytest
from chat_templates import ADD, make_tokenizer, with_wide_marks

from rlightning.environments.chat_format import ChatFormat
from rlightning.environments.messages import AssistantMessage
from rlightning.environments.partial_message import PartialMessage, TokenText

GLM = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
DEEPSEEK = with_wide_marks(
    '<|tool_calls_begin|><|tool_call_begin|>add<|tool_sep|>{"a": 2}<|tool_call_end|><|tool_calls_end|>'
)
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


def read_parts(pieces: Sequence[Sequence[int]], message: PartialMessage) -> list[tuple[str, str]]:
    """What is certain after each piece."""
    parts = []
    for piece in pieces:
        message.add(piece)
        parts.append((message.reasoning, message.content))
    return parts


@pytest.mark.parametrize(
    ("family", "text", "certain"),
    [
        ("qwen3", "Four \U0001f914 and\n\nmore.", ("", "Four \U0001f914 and\n\nmore.")),
        ("qwen3", "<think>\nhm \u00bd\n</think>\n\nSo: four.", ("hm \u00bd", "So: four.")),
        ("qwen3", f"<think>hm</think>So.\n{HERMES}\n{HERMES}", ("hm", "So.")),
        ("qwen3", f"<think>{HERMES}</think>So", (HERMES, "So")),
        ("qwen3", "a < b, <b>c</b> [d]", ("", "a < b, <b>c</b> [d]")),
        ("qwen3", "No call: <tool_cal", ("", "No call:")),
        ("qwen3", "<think>never ends <", ("never ends", "")),
        ("qwen3 thinking", "hm\n</think>\n\nSo.", ("hm", "So.")),
        ("llama3", '{"name": "add", "parameters": {"a": 2}}', ("", "")),
        ("llama3", 'So {"a": 2}', ("", 'So {"a": 2}')),
        ("mistral", 'So:[TOOL_CALLS][{"name": "add", "arguments": {"a": 2}}]', ("", "So:")),
        ("deepseek", f"So now.{DEEPSEEK}", ("", "So now.")),
        ("glm", f"<think>hm</think>\nSo now.\n{GLM}", ("hm", "So now.")),  # read by another package
    ],
)
@pytest.mark.parametrize("size", [1, 3])
def test_parts_of_a_turn_begin_what_it_says(family: str, text: str, certain: tuple[str, str], size: int) -> None:
    if family == "glm":
        pytest.importorskip("renderers")
    tokenizer = make_tokenizer(family)
    chat_format = ChatFormat(tokenizer)
    prompt_ids = chat_format.render([{"role": "user", "content": "hi"}], [ADD])
    token_ids = tokenizer(text, add_special_tokens=False).input_ids
    message = chat_format.begin_message([ADD], prompt_ids=prompt_ids)
    assert message is not None
    pieces = [token_ids[start : start + size] for start in range(0, len(token_ids), size)]
    parts = read_parts(pieces, message)
    assert parts[-1] == certain
    assert size > 1 or len({content for _, content in parts}) > min(2, len(certain[1]) // 3)
    whole = chat_format.parse(token_ids, [ADD], prompt_ids=prompt_ids)
    for (reasoning, content), (more_reasoning, more_content) in zip(
        parts, [*parts[1:], (whole.reasoning or "", whole.content)], strict=True
    ):
        assert more_reasoning.startswith(reasoning) and more_content.startswith(content)
        assert "\ufffd" not in reasoning + content
    assert message.finish(whole) == whole


def test_channels_are_read_when_the_turn_is_whole() -> None:
    assert ChatFormat(make_tokenizer("gpt-oss")).begin_message([ADD], prompt_ids=[1]) is None


def test_calls_without_tools_are_text_at_once() -> None:
    tokenizer = make_tokenizer("qwen3")
    message = ChatFormat(tokenizer).begin_message(None, prompt_ids=[1])
    assert message is not None
    message.add(tokenizer(HERMES, add_special_tokens=False).input_ids)
    assert message.content == HERMES


def test_stop_strings_and_their_beginnings_are_held_back() -> None:
    message = PartialMessage(TokenText(bytes_to_text), reads_thought=False, stops=["END", "\n\n"])
    parts = read_parts([[byte] for byte in b"a EN b\nc END d"], message)
    contents = [content for _, content in parts]
    assert [content.rstrip() for content in contents[:8]] == [*["a"] * 4, "a EN", "a EN b", "a EN b", "a EN b\nc"]
    assert {content.rstrip() for content in contents[8:]} == {"a EN b\nc"}


def test_parser_that_differs_continues_what_was_given() -> None:
    message = PartialMessage(TokenText(bytes_to_text))
    message.add(b"One two")
    assert message.finish(AssistantMessage("Something else")).content == "One two"
    assert message.finish(AssistantMessage("One two three", "why")) == AssistantMessage("One two three", "why")


def test_invalid_bytes_are_held_back_until_decided() -> None:
    text = TokenText(bytes_to_text)
    pieces = [b"a", b"\xf0\x9f", b"\xa4\x94", b"\xff", b"b", b"\xc2"]
    assert [text.add(piece) for piece in pieces] == ["a", "", "\U0001f914", "", "\ufffdb", ""]


def bytes_to_text(token_ids: list[int]) -> str:
    return bytes(token_ids).decode(errors="replace")
