"""Chats as tokens: what follows a sampled turn is what the chat template writes there, in the forms of families."""

import json
import sys
from functools import cache
from typing import Any

import pytest
from chat_templates import SPECIAL, TEMPLATES, make_tokenizer

from rlightning.data.formatting import PromptFormat
from rlightning.environments import Message
from rlightning.environments.chat_format import ChatFormat
from rlightning.errors import ConfigError
from rlightning.types import Prompt

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    },
}
USER: Message = {"role": "user", "content": "What is 2+2?"}
PLAIN: Message = {"role": "assistant", "content": "four"}


def calls(*arguments: dict[str, Any]) -> Message:
    listed = [
        {"id": f"call0000{i}", "type": "function", "function": {"name": "add", "arguments": json.dumps(one)}}
        for i, one in enumerate(arguments)
    ]
    return {"role": "assistant", "content": None, "tool_calls": listed}


def answer(number: int = 0) -> Message:
    return {"role": "tool", "name": "add", "tool_call_id": f"call0000{number}", "content": "4"}


@cache
def get_tokenizer(family: str) -> Any:
    return make_tokenizer(family)


def get_format(family: str, **arguments: Any) -> ChatFormat:
    return ChatFormat(get_tokenizer(family), arguments)


ONE, TWO = calls({"a": 2, "b": "2"}), calls({"a": 2, "b": "2"}, {"a": 1, "b": "ä"})
CONVERSATIONS: dict[str, tuple[Message, list[Message]]] = {
    "chat": (PLAIN, [USER]),
    "one call": (ONE, [answer()]),
    "two calls": (TWO, [answer(), answer(1)]),
    "a user's message after the answer": (ONE, [answer(), USER]),
    "empty turn": ({"role": "assistant", "content": ""}, [USER]),
}
WITHOUT = {("gemma3", name) for name in CONVERSATIONS if "call" in name or "answer" in name} | {("llama3", "two calls")}
"""Templates that refuse such a conversation."""


APPEND_ONLY = [family for family in TEMPLATES if not family.startswith("qwen3")]
CASES = [(family, name) for family in APPEND_ONLY for name in CONVERSATIONS if (family, name) not in WITHOUT]


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "cut"])
@pytest.mark.parametrize(("family", "name"), CASES)
def test_observations_follow_as_the_whole_conversation_is_rendered(family: str, name: str, ended: bool) -> None:
    chat_format, tokenizer = get_format(family), get_tokenizer(family)
    said, observations = CONVERSATIONS[name]
    tools = [ADD] if "call" in name or "answer" in name else None
    start = chat_format.render([USER], tools)
    full = chat_format.render([USER, said, *observations], tools)
    assert full[: len(start)] == start
    end = tokenizer.convert_tokens_to_ids(SPECIAL[family].split()[0])
    turn = chat_format.render([USER, said], tools, add_generation_prompt=False)[len(start) :]
    while turn and turn[-1] != end and tokenizer.decode(turn[-1:]).isspace():
        turn = turn[:-1]
    sampled = turn if turn[-1:] == [end] else [*turn, full[len(start) + len(turn)]]  # GLM's begins the next turn
    if not ended:
        sampled = sampled[:-1]
    added = chat_format.render_observations(observations, sampled=sampled, ended=ended)
    assert tokenizer.decode([*start, *sampled, *added]) == tokenizer.decode(full)
    assert [*start, *sampled, *added] == full


def test_reasoning_stays_where_a_template_would_drop_it() -> None:
    chat_format, tokenizer = get_format("qwen3"), get_tokenizer("qwen3")
    start = chat_format.render([USER])
    sampled = tokenizer("<think>\nhm\n</think>\n\nfour<|im_end|>").input_ids
    added = chat_format.render_observations([USER], sampled=sampled, ended=True)
    text = tokenizer.decode([*start, *sampled, *added])
    assert text.endswith(
        "<think>\nhm\n</think>\n\nfour<|im_end|>\n<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    full = chat_format.render_text([USER, {**PLAIN, "reasoning_content": "hm"}, USER])
    assert "hm" not in full and full.endswith(
        "four<|im_end|>\n<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_later_turns_begin_as_the_first_does() -> None:
    for family, arguments, beginning in (
        ("qwen3", {"enable_thinking": False}, "<think>\n\n</think>\n\n"),
        ("qwen3 thinking", {}, "<think>\n"),
    ):
        chat_format, tokenizer = get_format(family, **arguments), get_tokenizer(family)
        sampled = tokenizer("four<|im_end|>").input_ids
        added = chat_format.render_observations([USER], sampled=sampled, ended=True)
        for tokens in (chat_format.render([USER]), added):
            assert tokenizer.decode(tokens).endswith(f"<|im_start|>assistant\n{beginning}")


@pytest.mark.parametrize("end", ["<|eom_id|>", "<|eot_id|>"])
def test_another_token_that_ends_a_turn_is_kept(end: str) -> None:
    chat_format, tokenizer = get_format("llama3"), get_tokenizer("llama3")
    sampled = tokenizer(f"four{end}", add_special_tokens=False).input_ids
    added = chat_format.render_observations([USER], sampled=sampled, ended=True)
    assert tokenizer.decode(added).startswith("<|start_header_id|>user")


def test_stop_string_leaves_the_turn_to_be_closed() -> None:
    chat_format, tokenizer = get_format("qwen2.5"), get_tokenizer("qwen2.5")
    sampled = tokenizer("four</answer>").input_ids
    added = chat_format.render_observations([USER], sampled=sampled, ended=True)
    assert tokenizer.decode(added).startswith("<|im_end|>\n<|im_start|>user")
    nothing = chat_format.render_observations([USER], sampled=[], ended=False)
    assert nothing == added


def test_stop_token_of_the_runs_own_leaves_the_turn_to_be_closed() -> None:
    tokenizer = make_tokenizer("qwen2.5")
    tokenizer.add_special_tokens({"additional_special_tokens": ["</tool_call>"]})
    sampled = tokenizer('<tool_call>{"name": "add"}</tool_call>').input_ids
    added = ChatFormat(tokenizer).render_observations([answer()], sampled=sampled, ended=True)
    assert tokenizer.decode(added).startswith("<|im_end|>\n<|im_start|>user")


def test_one_of_several_templates_is_for_tools() -> None:
    tokenizer = make_tokenizer("qwen2.5")
    tokenizer.chat_template = {"default": TEMPLATES["gemma3"], "tool_use": TEMPLATES["qwen2.5"]}
    ChatFormat(tokenizer).check_tools()
    tokenizer.chat_template = None
    ChatFormat(tokenizer, {"chat_template": TEMPLATES["qwen2.5"]}).check_tools()


def test_no_merge_reaches_into_what_was_sampled() -> None:
    chat_format, tokenizer = get_format("qwen2.5"), get_tokenizer("qwen2.5")
    newlines = tokenizer("four\n\n").input_ids
    one, two = tokenizer("four\n").input_ids, tokenizer("\n").input_ids
    assert newlines != [*one, *two]  # the two newlines are one token where they are read together
    for sampled in ([*one, *two], newlines):
        added = chat_format.render_observations([USER], sampled=sampled, ended=False)
        assert added[0] == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_half_a_character_at_a_cut_is_kept_as_sampled() -> None:
    chat_format, tokenizer = get_format("qwen2.5"), get_tokenizer("qwen2.5")
    sampled = tokenizer("4 €").input_ids[:-1]
    assert chat_format.parse(sampled).content == "4 \ufffd"
    added = chat_format.render_observations([USER], sampled=sampled, ended=False)
    assert tokenizer.decode(added).startswith("<|im_end|>\n")


# What is read


def parse(family: str, text: str, **arguments: Any) -> Any:
    tokenizer = get_tokenizer(family)
    return get_format(family).parse(tokenizer(text, add_special_tokens=False).input_ids, [ADD], **arguments)


def named(message: Any) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


READ_HERE = ("qwen2.5", "qwen3", "llama3", "mistral")


@pytest.mark.parametrize(
    ("family", "name"),
    [(f, name) for f in READ_HERE for name in ("one call", "two calls") if (f, name) not in WITHOUT],
)
def test_calls_are_read_as_the_template_writes_them(family: str, name: str) -> None:
    said, _ = CONVERSATIONS[name]
    chat_format = get_format(family)
    start, full = chat_format.render([USER], [ADD]), chat_format.render([USER, said], [ADD], False)
    message = chat_format.parse(full[len(start) :], [ADD], turn=3)
    assert named(message) == [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in said["tool_calls"]
    ]
    assert message.errors == () and message.content in (
        "",
        "<|start_header_id|>assistant<|end_header_id|>",
        "assistant",
    )
    assert [call.id for call in message.tool_calls] == [f"call0030{i}" for i in range(len(message.tool_calls))]


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("four<|im_end|>", "four", None),
        ("<|im_end|>", "", None),
        ("", "", None),
        ("<think>\nhm\n</think>\n\nfour<|im_end|>", "four", "hm"),
        ("<think>\nhm", "", "hm"),
        ("a </think> b", "a </think> b", None),
    ],
)
def test_reasoning_and_content(text: str, content: str, reasoning: str | None) -> None:
    message = parse("qwen3", text)
    assert (message.content, message.reasoning, message.tool_calls, message.errors) == (content, reasoning, (), ())


def test_thought_that_the_prompt_begins() -> None:
    message = parse("qwen3 thinking", "hm\n</think>\n\nfour<|im_end|>")
    assert (message.content, message.reasoning) == ("four", "hm")
    assert parse("qwen3 thinking", "hm").reasoning == "hm"
    closed = get_tokenizer("qwen3 thinking")("<|im_start|>assistant\n<think>\n\n</think>\n\n").input_ids
    message = parse("qwen3 thinking", "four", prompt_ids=closed)
    assert (message.content, message.reasoning) == ("four", None)


def test_calls_in_a_thought_are_none() -> None:
    message = parse("qwen3", '<think>\n<tool_call>{"name": "add", "arguments": {}}</tool_call>\n</think>\n\nno')
    assert message.tool_calls == () and message.content == "no"


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen3", '<tool_call>{"name":"add","arguments":{"a":2}}</tool_call>'),
        ("qwen3", 'So:\n<tool_call>\n\n{ "arguments" : { "a" : 2 } ,\n "name" : "add" }\n\n</tool_call>\n'),
        ("qwen3", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}</tool_call><|im_end|>'),
        ("llama3", '{"name": "add", "parameters": {"a": 2}}<|eom_id|>'),
        ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 2}}'),
        ("llama3", '\n{ "type": "function", "name": "add", "parameters": {"a": 2}}'),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 2}}]</s>'),
        ("mistral", '[TOOL_CALLS] [{"arguments": {"a": 2}, "name": "add", "id": "abcdefghi"}]'),
        ("mistral", 'So[TOOL_CALLS]add[ARGS]{"a": 2}</s>'),
    ],
)
def test_a_call_in_other_words_is_the_same(family: str, text: str) -> None:
    message = parse(family, text)
    assert named(message) == [("add", {"a": 2})] and message.errors == ()
    assert message.content in ("", "So", "So:")


@pytest.mark.parametrize(
    ("family", "text", "reason"),
    [
        ("qwen3", '<tool_call>{"name": "add", "arguments": {"a": 2', "A tool call has no end."),
        ("qwen3", "<tool_call>{'name': 'add'}</tool_call>", "A tool call is no JSON (Expecting property name"),
        ("qwen3", "<tool_call>[1]</tool_call>", "A tool call is no JSON object."),
        ("qwen3", '<tool_call>{"arguments": {}}</tool_call>', 'A tool call has no "name".'),
        (
            "qwen3",
            '<tool_call>{"name": "add", "arguments": 2}</tool_call>',
            'The "arguments" of the call of add are no',
        ),
        ("qwen3", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "A tool call is no JSON (NaN is"),
        ("qwen3", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "A tool call has half of a surrogate"),
        ("qwen3", "<tool_call>" + "[" * 100_000 + "</tool_call>", "A tool call is no JSON (maximum recursion depth"),
        (
            "qwen3",
            '<tool_call>{"name": "add", "arguments": {"a": 1' + "0" * 5000 + "}}</tool_call>",
            "A tool call is no",
        ),
        ("llama3", '{"name": "add", "parameters": {"a"', "A tool call is no JSON (Expecting ':'"),
        ("mistral", "[TOOL_CALLS]add(2)", "A tool call is no JSON (Expecting value"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{", "A tool call is no JSON (Expecting property name"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(family: str, text: str, reason: str) -> None:
    message = parse(family, text)
    (error,) = message.errors
    assert message.tool_calls == () and error.startswith(reason)
    assert "Write calls as" in error and len(error) < 700


def test_a_good_call_beside_a_broken_one_counts() -> None:
    good = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    message = parse("qwen2.5", f"{good}\n<tool_call>no</tool_call>\n{good}<|im_end|>")
    assert len(message.tool_calls) == 2 and len(message.errors) == 1


def test_calls_without_end_are_few() -> None:
    message = parse("qwen2.5", '<tool_call>{"name": "add", "arguments": {}}</tool_call>' * 200)
    assert len(message.tool_calls) == 32 and len({call.id for call in message.tool_calls}) == 32
    assert message.errors == ("A turn has at most 32 tool calls: 168 more were not made.",)


def test_an_answer_may_have_any_words() -> None:
    chat_format, tokenizer = get_format("qwen2.5"), get_tokenizer("qwen2.5")
    for observation in ({**answer(), "content": "ANSWER OF THE POLICY"}, {**USER, "content": "ANSWER OF THE POLICY"}):
        added = chat_format.render_observations([observation, answer()], sampled=[], ended=False)
        assert tokenizer.decode(added).count("ANSWER OF THE POLICY") == 1


def test_json_in_a_plain_answer_is_no_call() -> None:
    assert parse("llama3", 'It is {"name": "add", "parameters": {}}').tool_calls == ()
    assert parse("llama3", '{"result": 4}').content == '{"result": 4}'
    assert get_format("qwen3").parse(get_tokenizer("qwen3")("<tool_call>x").input_ids).errors == ()  # without tools


def test_message_of_a_chat_api() -> None:
    said = '<think>\nhm\n</think>\n\n<tool_call>{"name": "add", "arguments": {"b": "ä"}}</tool_call>'
    assert parse("qwen3", said).to_message() == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"b": "ä"}'}}],
    }


@pytest.mark.parametrize("family", ["qwen3", "llama3", "glm", "deepseek"])
def test_package_renderers_reads_the_same(family: str) -> None:
    pytest.importorskip("renderers")
    from renderers import config_from_name, create_renderer

    chat_format = get_format(family)
    said = ONE if family == "llama3" else TWO
    start = chat_format.render([USER], [ADD])
    sampled = chat_format.render([USER, said], [ADD], False)[len(start) :]
    if family in ("qwen3", "llama3"):  # read here, and by the package
        name = {"qwen3": "qwen3", "llama3": "llama-3"}[family]
        parsed = create_renderer(get_tokenizer(family), config_from_name(name)).parse_response(
            sampled, prompt_ids=start
        )
        expected = [(call.name, call.arguments) for call in parsed.tool_calls]
    else:
        assert "by the package renderers" in chat_format.describe()
        expected = [
            (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in said["tool_calls"]
        ]
    assert named(chat_format.parse(sampled, [ADD], prompt_ids=start)) == expected != []
    without_tools = chat_format.parse(sampled, prompt_ids=start)
    assert without_tools.tool_calls == () and all(name in without_tools.content for name, _ in expected)


# What is said and refused


def test_describe_says_what_the_template_does() -> None:
    kept = ("is append-only", "drops reasoning once a message follows")
    for family, what in {
        "qwen2.5": ("Hermes", kept[0]),
        "qwen3": ("Hermes", kept[1]),
        "qwen3 thinking": ("Hermes", kept[1]),
        "llama3": ("Llama 3", kept[0]),
        "mistral": ("Mistral", kept[0]),
        "gemma3": ("no tools", kept[0]),
    }.items():
        line = get_format(family).describe()
        assert what[0] in line and f"the chat template {what[1]}" in line and "\n" not in line
        assert (get_format(family).rewrites is None) == (what[1] == kept[0])


def test_describe_names_the_argument_that_keeps_reasoning() -> None:
    tokenizer = make_tokenizer("qwen3")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{% if loop.index0 > ns.last and (loop.last or reasoning) %}",
        "{% if reasoning and (preserve_thinking or loop.index0 > ns.last) %}",
    )
    line = ChatFormat(tokenizer).describe()
    assert line.endswith("chat_template_arguments: {preserve_thinking: true} has it append only.")
    assert "is append-only" in ChatFormat(tokenizer, {"preserve_thinking": True}).describe()


def test_families_that_another_package_reads_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "renderers", None)
    chat_format = get_format("glm")
    assert "by the package renderers, which is not installed: pip install" in chat_format.describe()
    with pytest.raises(ConfigError, match=r"^Tool calls as GLM 4\.5's are read by the package renderers, which is not"):
        chat_format.check_tools()


def test_models_without_tools_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^The model's chat template writes tool calls in no form that is known"):
        get_format("gemma3").check_tools()
    tokenizer = make_tokenizer("qwen3")
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"^Tools need a chat template, and the model's tokenizer has none\."):
        ChatFormat(tokenizer).check_tools()
    assert ChatFormat(tokenizer).describe().startswith("Chats: the tokenizer has no chat template")


def test_images_and_refused_conversations_are_one_line() -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:..."}}]}
    with pytest.raises(ConfigError, match=r"message 1, part 1 is .* Only text is read"):
        get_format("qwen3").render([image])
    with pytest.raises(ConfigError, match=r"^The model's chat template refuses the conversation: .*must alternate"):
        get_format("gemma3").render([USER, USER])


def test_a_system_message_that_changes_is_another_beginning() -> None:
    chat_format = get_format("qwen3")
    first, second = (
        chat_format.render([{"role": "system", "content": text}, USER]) for text in ("Be short.", "Be long.")
    )
    assert first != second and first[:3] == second[:3]


def test_prompt_is_read_from_its_row() -> None:
    rows: dict[str, Any] = {"question": "2+2", "chat": [USER]}
    tokenizer = get_tokenizer("qwen3")
    prompt = Prompt(4, "", [1], rows)
    by_template = ChatFormat(tokenizer, prompt_format=PromptFormat(template="{question}=", system="Add."))
    assert [m["content"] for m in by_template.prompt_messages(prompt)] == ["Add.", "2+2="]
    assert ChatFormat(tokenizer, prompt_format=PromptFormat(column="chat")).prompt_messages(prompt) == [USER]
    rendered = ChatFormat(tokenizer, prompt_format=PromptFormat(column="rendered"))
    with pytest.raises(ConfigError, match=r"^Prompt 4 begins with a special token"):
        rendered.prompt_messages(Prompt(4, "", [1], {"rendered": "<|im_start|>user\nhi"}))
