"""Chats as tokens: what follows a sampled turn is what the chat template writes there, in the forms of families."""

import json
import re
import sys
from functools import cache
from typing import Any

import pytest
from chat_templates import ADD, SPECIAL, TEMPLATES, make_tokenizer, with_wide_marks

from rlightning.data.formatting import PromptFormat
from rlightning.environments import AssistantMessage, Message
from rlightning.environments.chat_format import ChatFormat
from rlightning.errors import ConfigError
from rlightning.types import Prompt

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


def encode(family: str, text: str) -> list[int]:
    return list(get_tokenizer(family)(text, add_special_tokens=False).input_ids)


def decode(family: str, token_ids: list[int]) -> str:
    return str(get_tokenizer(family).decode(token_ids))


ONE, TWO = calls({"a": 2, "b": "2"}), calls({"a": 2, "b": "2"}, {"a": 1, "b": "ä"})
CONVERSATIONS: dict[str, tuple[Message, list[Message]]] = {
    "chat": (PLAIN, [USER]),
    "one call": (ONE, [answer()]),
    "two calls": (TWO, [answer(), answer(1)]),
    "a user's message after the answer": (ONE, [answer(), USER]),
    "empty turn": ({"role": "assistant", "content": ""}, [USER]),
}
WITHOUT = {("gemma3", name) for name in CONVERSATIONS if "call" in name or "answer" in name} | {
    ("llama3", "two calls"),
    ("mistral", "a user's message after the answer"),
}
"""Templates that refuse such a conversation."""
REWRITES = {
    "qwen3": "drops reasoning",
    "qwen3 thinking": "drops reasoning",
    "deepseek r1": "drops reasoning",
    "gpt-oss": "drops reasoning",
    "mistral": "changes earlier turns",
}
CASES = [(family, name) for family in TEMPLATES for name in CONVERSATIONS if (family, name) not in WITHOUT]


def find_turn(family: str, said: Message, observations: list[Message], tools: Any) -> tuple[str, str, str]:
    """The policy's words, the token that ends them, and all of the conversation as the template has it."""
    render = get_format(family).render_text
    start, turn = render([USER], tools), render([USER, said], tools, False)
    full = render([USER, said, *observations], tools)
    begun = start if turn.startswith(start) else start.removesuffix("<think>\n")
    assert turn.startswith(begun)
    text = "\n</think>\n\n" * (begun != start) + turn[len(begun) :]
    for end in (SPECIAL[family].split()[0], "<|call|>"):
        if text.rstrip().endswith(end):
            return text.rstrip().removesuffix(end), end, full
    return text, full.removeprefix(turn).partition(">")[0] + ">", full  # GLM's begins the next turn


def without_changes(text: str) -> str:
    """A text as a template rewrites it: without an empty thought, and gpt-oss's turns ended as earlier ones."""
    return re.sub(r"<think>\s*</think>\s*", "", text).replace("<|return|>", "<|end|>")


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "cut"])
@pytest.mark.parametrize(("family", "name"), CASES)
def test_observations_follow_as_the_whole_conversation_is_rendered(family: str, name: str, ended: bool) -> None:
    chat_format, (said, observations) = get_format(family), CONVERSATIONS[name]
    tools = [ADD] if "call" in name or "answer" in name else None
    words, end, full = find_turn(family, said, observations, tools)
    start, sampled = chat_format.render([USER], tools), encode(family, words + end * ended)
    added = chat_format.render_observations(observations, sampled=sampled, ended=ended)
    text = decode(family, [*start, *sampled, *added])
    assert without_changes(text) == without_changes(full)
    assert text == full or family in REWRITES
    assert text != full or [*start, *sampled, *added] == chat_format.render([USER, said, *observations], tools)


@pytest.mark.parametrize("family", TEMPLATES)
def test_what_was_sampled_stays_whatever_it_ends_with(family: str) -> None:
    """A stop string, half a character, line breaks that are one token where they are read together, or nothing."""
    chat_format = get_format(family)
    one_newline, two_newlines = encode(family, "four\n"), encode(family, "four\n\n")
    newlines = [*one_newline, *encode(family, "\n")]
    assert newlines != two_newlines
    half = encode(family, {"gpt-oss": "<|channel|>final<|message|>4 €"}.get(family, "4 €"))[:-1]
    message = chat_format.parse(half, prompt_ids=chat_format.render([USER]))
    assert "4 \ufffd" in (message.content, message.reasoning)
    expected = chat_format.render_observations([USER], sampled=encode(family, "four"), ended=False)
    for sampled, ended in ((newlines, False), (two_newlines, False), (half, False), ([], False)):
        assert chat_format.render_observations([USER], sampled=sampled, ended=ended) == expected
    stopped = encode(family, "four</answer>")
    assert chat_format.render_observations([USER], sampled=stopped, ended=True) == expected


@pytest.mark.parametrize(
    ("family", "said", "follows"),
    [
        ("qwen2.5", "four<|im_end|>", "\n<|im_start|>user"),
        ("qwen2.5", "four<|endoftext|>", "\n<|im_start|>user"),
        ("llama3", "four<|eot_id|>", "<|start_header_id|>user"),
        ("llama3", "four<|eom_id|>", "<|start_header_id|>user"),
        ("glm", "\nfour<|user|>", "\nWhat"),
        ("glm", "\nfour<|endoftext|>", "<|user|>\nWhat"),
        ("gpt-oss", "<|channel|>final<|message|>four<|return|>", "<|start|>user"),
        ("gpt-oss", "<|channel|>commentary to=functions.no<|message|>{<|call|>", "<|start|>user"),
    ],
)
def test_a_turn_is_closed_once_whatever_ended_it(family: str, said: str, follows: str) -> None:
    added = get_format(family).render_observations([USER], sampled=encode(family, said), ended=True)
    assert decode(family, added).startswith(follows)


@pytest.mark.parametrize(
    ("family", "arguments", "beginning"),
    [
        ("qwen3", {"enable_thinking": False}, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("qwen3 thinking", {}, "<|im_start|>assistant\n<think>\n"),
        ("deepseek", {}, with_wide_marks("<|Assistant|></think>")),
        ("deepseek r1", {}, with_wide_marks("<|Assistant|><think>\n")),
        ("glm", {}, "<|assistant|>\n<think></think>"),
    ],
)
def test_later_turns_begin_as_the_first_does(family: str, arguments: dict[str, Any], beginning: str) -> None:
    chat_format = get_format(family, **arguments)
    sampled = encode(family, "four" + SPECIAL[family].split()[0])
    added = chat_format.render_observations([USER], sampled=sampled, ended=True)
    for tokens in (chat_format.render([USER]), added):
        assert decode(family, tokens).endswith(beginning)


def test_own_stop_token_leaves_turn_to_be_closed() -> None:
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


def test_an_answer_may_have_any_words() -> None:
    for observation in ({**answer(), "content": "ANSWER OF THE POLICY"}, {**USER, "content": "ANSWER OF THE POLICY"}):
        added = get_format("qwen2.5").render_observations([observation, answer()], sampled=[], ended=False)
        assert decode("qwen2.5", added).count("ANSWER OF THE POLICY") == 1


# What is read


def parse(family: str, text: str, **arguments: Any) -> AssistantMessage:
    chat_format = get_format(family)
    arguments.setdefault("prompt_ids", chat_format.render([USER]))
    return chat_format.parse(encode(family, text), [ADD], **arguments)


def named(message: AssistantMessage) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


@pytest.mark.parametrize(("family", "name"), [case for case in CASES if case[1] in ("one call", "two calls")])
def test_calls_are_read_as_the_template_writes_them(family: str, name: str) -> None:
    if family == "glm":
        pytest.importorskip("renderers")
    said, observations = CONVERSATIONS[name]
    words, end, _ = find_turn(family, said, observations, [ADD])
    prompt_ids = get_format(family).render([USER], [ADD])
    message = parse(family, words + end, prompt_ids=prompt_ids, turn=3)
    written = said["tool_calls"][: 1 if family == "gpt-oss" else None]  # more than the template writes
    assert named(message) == [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in written]
    assert (message.content, message.errors) == ("", ())
    assert [call.id for call in message.tool_calls] == [f"call0030{i}" for i in range(len(written))]
    text = get_format(family).parse(encode(family, words + end), prompt_ids=prompt_ids)
    assert text.tool_calls == () and text.content.count("add") == len(written)  # without tools


@pytest.mark.parametrize(
    ("family", "text", "content", "reasoning"),
    [
        ("qwen3", "four<|im_end|>", "four", None),
        ("qwen3", "<|im_end|>", "", None),
        ("qwen3", "", "", None),
        ("qwen3", "<think>\nhm\n</think>\n\nfour<|im_end|>", "four", "hm"),
        ("qwen3", "<think>\nhm", "", "hm"),
        ("qwen3", "a </think> b", "a </think> b", None),
        ("qwen3", "<think>\n<tool_call>{}</tool_call>\n</think>\n\nno", "no", "<tool_call>{}</tool_call>"),
        ("qwen3 thinking", "hm\n</think>\n\nfour<|im_end|>", "four", "hm"),
        ("qwen3 thinking", "hm", "", "hm"),
        ("deepseek r1", with_wide_marks("hm\n</think>\n\nfour<|end_of_sentence|>"), "four", "hm"),
        ("gpt-oss", "<|channel|>final<|message|>four<|return|>", "four", None),
        ("gpt-oss", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|mess", "", "hm"),
        ("gpt-oss", "<|channel|>analysis<|message|>hm", "", "hm"),
        ("gpt-oss", "<|channel|>anal", "", None),
        ("gpt-oss", "four<|return|>", "four", None),
    ],
)
def test_reasoning_is_split_from_content(family: str, text: str, content: str, reasoning: str | None) -> None:
    message = parse(family, text)
    assert (message.content, message.reasoning, message.tool_calls, message.errors) == (content, reasoning, (), ())


def test_prompt_with_closed_thought_is_followed_by_content() -> None:
    closed = encode("qwen3 thinking", "<|im_start|>assistant\n<think>\n\n</think>\n\n")
    message = parse("qwen3 thinking", "four", prompt_ids=closed)
    assert (message.content, message.reasoning) == ("four", None)


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
        ("mistral", '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a":2}</s>'),
        (
            "deepseek",
            with_wide_marks('So<|tool_calls_begin|><|tool_call_begin|>add<|tool_sep|>{ "a" : 2 }\n<|tool_call_end|>'),
        ),
        (
            "deepseek r1",
            "</think>So:"
            + with_wide_marks("<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>add\n```json\n")
            + '{\n "a":2}\n```'
            + with_wide_marks("<|tool_call_end|><|tool_calls_end|><|end_of_sentence|>"),
        ),
        ("gpt-oss", ' to=functions.add<|channel|>commentary json<|message|>{"a":2}<|call|>'),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>So<|end|>"
            '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{ "a" : 2 }<|call|>',
        ),
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
        ("gpt-oss", '<|channel|>commentary to=functions.add<|message|>{"a', "A tool call has no end."),
        (
            "deepseek",
            with_wide_marks("<|tool_calls_begin|><|tool_call_begin|>add<|tool_sep|>{"),
            "A tool call has no end.",
        ),
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


def test_json_in_a_plain_answer_is_no_call() -> None:
    assert parse("llama3", 'It is {"name": "add", "parameters": {}}').tool_calls == ()
    assert parse("llama3", '{"result": 4}').content == '{"result": 4}'
    assert (
        get_format("qwen3").parse(get_tokenizer("qwen3")("<tool_call>x").input_ids, prompt_ids=[]).errors == ()
    )  # without tools


def test_message_of_a_chat_api() -> None:
    said = '<think>\nhm\n</think>\n\n<tool_call>{"name": "add", "arguments": {"b": "ä"}}</tool_call>'
    assert parse("qwen3", said).to_message() == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"b": "ä"}'}}],
    }


@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen3", "qwen3"), ("llama3", "llama-3"), ("deepseek r1", "deepseek-v3"), ("gpt-oss", "gpt-oss")],
)
def test_package_renderers_reads_the_same(family: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("renderers")
    from renderers import config_from_name, create_renderer, gpt_oss

    monkeypatch.setattr(gpt_oss, "load_harmony_encoding", str)  # of a vocabulary to download, and no part of parsing
    words, end, _ = find_turn(family, TWO if (family, "two calls") in CASES else ONE, [answer()], [ADD])
    prompt_ids, sampled = get_format(family).render([USER], [ADD]), encode(family, words + end)
    head = encode(family, "<|start|>assistant") if family == "gpt-oss" else []  # which the package reads in no prompt
    parsed = create_renderer(get_tokenizer(family), config_from_name(name)).parse_response(
        [*head, *sampled], prompt_ids=prompt_ids
    )
    message = get_format(family).parse(sampled, [ADD], prompt_ids=prompt_ids)
    assert named(message) == [(call.name, call.arguments) for call in parsed.tool_calls] != []
    assert (message.content, message.reasoning or None) == (parsed.content, parsed.reasoning_content or None)


# What is said and refused


@pytest.mark.parametrize("family", TEMPLATES)
def test_describe_says_what_the_template_does(family: str) -> None:
    form = {
        **{"llama3": "Llama 3's", "mistral": "Mistral's", "gemma3": "no tools", "gpt-oss": "gpt-oss's"},
        **{"glm": "GLM 4.5's", "deepseek": "DeepSeek V3's", "deepseek r1": "DeepSeek V3's"},
    }.get(family, "Hermes's")
    line = get_format(family).describe()
    assert form in line and f"the chat template {REWRITES.get(family, 'is append-only')}" in line and "\n" not in line
    assert (get_format(family).rewrites is None) == (family not in REWRITES)


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


@pytest.mark.parametrize("family", TEMPLATES)
def test_images_and_changed_system_messages(family: str) -> None:
    chat_format = get_format(family)
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:..."}}]}
    with pytest.raises(ConfigError, match=r"message 1, part 1 is .* Only text is read"):
        chat_format.render([image])
    with pytest.raises(ConfigError, match=r"message 1, part 1 is .* Only text is read"):
        chat_format.render_observations([image], sampled=[], ended=False)
    texts = [chat_format.render_text([{"role": "system", "content": text}, USER]) for text in ("Short.", "Long.")]
    assert texts[0] != texts[1] == texts[0].replace("Short.", "Long.")  # another beginning


def test_refused_conversations_are_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^The model's chat template refuses the conversation: .*must alternate"):
        get_format("gemma3").render([USER, USER])


def test_messages_that_the_template_leaves_out_are_refused() -> None:
    chat_format, silent = get_format("qwen3"), {"role": "environment", "content": "4"}
    line = r"^The conversation: the chat template leaves out messages of the role 'environment'\. Use one of system, "
    with pytest.raises(ConfigError, match=line):
        chat_format.render([USER, silent])
    with pytest.raises(ConfigError, match=line):
        chat_format.render_observations([silent], sampled=[], ended=False)
    tokenizer = make_tokenizer("qwen3")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert ChatFormat(tokenizer).render_text([silent]) == "environment: 4\n"


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
