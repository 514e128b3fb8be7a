"""Chat templates as models were released with, which TRL ships, and Mistral's own tokenizer."""

import json
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from chat_templates import ADD, MISTRAL, SPECIAL, make_tokenizer
from test_chat_format import CONVERSATIONS, USER, named, without_changes
from tokenizers import AddedToken

from rlightning.environments import Message
from rlightning.environments.chat_format import ChatFormat
from rlightning.errors import ConfigError

APPENDS = "is append-only"
DROPS = "drops reasoning"
RELEASED = {
    "qwen2_5": ("qwen2.5", "tool calls as Hermes's", APPENDS),
    "qwen3": ("qwen3", "tool calls as Hermes's", DROPS),
    "qwen3_instruct_2507": ("qwen3", "tool calls as Hermes's", APPENDS),
    "qwen3_5_think": ("qwen3", "tool calls as Qwen3-Coder's", DROPS),
    "qwen3_6": ("qwen3", "tool calls as Qwen3-Coder's", "{preserve_thinking: true} has it append only"),
    "qwen3_8": ("qwen3", "tool calls as Qwen3-Coder's", APPENDS),
    "llama3": ("llama3", "no tools", APPENDS),
    "llama3_1": ("llama3", "tool calls as Llama 3's", APPENDS),
    "llama3_2": ("llama3", "tool calls as Llama 3's", APPENDS),
    "gemma3": ("gemma3", "no tools", APPENDS),
    "glm4moe": ("glm", "tool calls as GLM 4.5's", DROPS),
    "deepseekv3": ("deepseek", "tool calls as DeepSeek V3's", DROPS),
    "deepseek_r1_distill": ("deepseek r1", "tool calls as DeepSeek V3's", DROPS),
    "gptoss": ("gpt-oss", "tool calls as gpt-oss's", DROPS),
}
"""By the template's file: the family whose special tokens it has, how its calls are read, and what it rewrites."""
REFUSED = {
    *(("gemma3", name) for name in CONVERSATIONS if "call" in name or "answer" in name),
    ("llama3_1", "two calls"),
    ("llama3_2", "two calls"),
}
ENDLESS = {("deepseek_r1_distill", name) for name in ("one call", "a user's message after the answer")}
"""Where the template leaves out the tokens with which the model ends its calls, unless there are two; so that it does
not say how a turn that was cut there ends."""
END_OF_CALLS = "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"  # noqa: RUF001
SPECIALS = re.compile(r"<\|[a-zA-Z_]+\|>|<｜[^｜<>]+｜>|\[/?[A-Z_]+\]|<(?:start|end)_of_turn>")  # noqa: RUF001
TURN_ENDS = re.compile(r"(<\|(?:im_end|eot_id|return|call|end)\|>|<end_of_turn>|<｜end▁of▁sentence｜>)\s*\Z")  # noqa: RUF001
CASES = [(file, name) for file in RELEASED for name in CONVERSATIONS]


def find_template(file: str) -> str:
    """Return a template of an installed TRL, whose import would take seconds."""
    spec = find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("TRL, which ships the models' templates, is not installed: `make test-all` installs it")
    return (Path(spec.origin).parent / "chat_templates" / f"{file}.jinja").read_text(encoding="utf-8")


@cache
def get_format(file: str) -> ChatFormat:
    """A tokenizer of bytes with the template and its special tokens."""
    tokenizer = make_tokenizer(RELEASED[file][0])
    tokenizer.chat_template = find_template(file)
    named = sorted(set(SPECIALS.findall(tokenizer.chat_template)) - set(tokenizer.get_vocab()))
    tokens: list[Any] = [AddedToken(text, special=True, normalized=False) for text in named]
    tokenizer.add_tokens(tokens, special_tokens=True)
    return ChatFormat(tokenizer)


def encode(chat_format: ChatFormat, text: str) -> list[int]:
    return list(chat_format.tokenizer(text, add_special_tokens=False).input_ids)


def tools_of(name: str) -> list[Message] | None:
    return [ADD] if "call" in name or "answer" in name else None


def find_turn(chat_format: ChatFormat, file: str, name: str) -> tuple[str, str, str, str]:
    """What comes before the policy's turn, its words, the token that ends it, and the whole conversation."""
    (said, observations), tools = CONVERSATIONS[name], tools_of(name)
    start, turn = chat_format.render_text([USER], tools), chat_format.render_text([USER, said], tools, False)
    full = chat_format.render_text([USER, said, *observations], tools)
    if (file, name) in ENDLESS:
        full, turn = full.replace(turn, turn + END_OF_CALLS, 1), turn + END_OF_CALLS
    begun = start if turn.startswith(start) else start.removesuffix("<think>\n")
    assert turn.startswith(begun)
    words = turn[len(begun) :]
    if end := TURN_ENDS.search(words):
        return begun, words[: end.start()], end[1], full
    return begun, words, full.removeprefix(turn).partition(">")[0].lstrip() + ">", full  # GLM's begins the next turn


@pytest.mark.long
@pytest.mark.parametrize(("file", "name"), CASES)
def test_observations_follow_as_the_released_template_renders_them(file: str, name: str) -> None:
    chat_format, (said, observations) = get_format(file), CONVERSATIONS[name]
    if (file, name) in REFUSED:
        with pytest.raises(ConfigError, match="template refuses the conversation: "):
            find_turn(chat_format, file, name)
        return
    begun, words, end, full = find_turn(chat_format, file, name)
    for ended in (True,) if (file, name) in ENDLESS else (True, False):
        sampled = encode(chat_format, words + end * ended)
        added = chat_format.render_observations(observations, sampled=sampled, ended=ended)
        text = chat_format.decode([*encode(chat_format, begun), *sampled, *added])
        assert without_changes(text) == without_changes(full)
        assert text == full or RELEASED[file][2] != APPENDS
    if tools_of(name) is not None and file != "llama3":
        prompt_ids = encode(chat_format, begun)
        message = chat_format.parse(encode(chat_format, words + end), [ADD], prompt_ids=prompt_ids)
        written = said["tool_calls"][: 1 if file == "gptoss" else None]  # more than the template writes
        calls = [call["function"] for call in written]
        assert named(message) == [(call["name"], json.loads(call["arguments"])) for call in calls]
        assert message.errors == ()


@pytest.mark.parametrize("file", RELEASED)
def test_released_template_is_described(file: str) -> None:
    _, calls, rewrites = RELEASED[file]
    line = get_format(file).describe()
    assert line.startswith(f"Chats: {calls}") and rewrites in line


@pytest.mark.slow
def test_mistral_conversations_keep_ids_of_the_released_tokenizer() -> None:
    """Tokens, not texts alone: of all families, this one's tokenizer comes with a package (vLLM needs it)."""
    data = pytest.importorskip("mistral_common.tokens.tokenizers").__file__
    mistral = pytest.importorskip("transformers.integrations.mistral")
    tokenizer = mistral.convert_tekken_tokenizer(str(Path(data).parents[2] / "data" / "tekken_240911.json"))
    assert len(tokenizer) == 131072
    tokenizer.chat_template = MISTRAL
    chat_format, end = ChatFormat(tokenizer), SPECIAL["mistral"].split()[0]
    for name, (said, observations) in CONVERSATIONS.items():
        if name == "a user's message after the answer":
            continue  # the template refuses it
        tools = tools_of(name)
        start, turn = chat_format.render([USER], tools), chat_format.render_text([USER, said], tools, False)
        words = turn.removeprefix(chat_format.render_text([USER], tools)).removesuffix(end)
        whole = chat_format.render([USER, said, *observations], tools)
        for ended in (True, False):
            sampled = encode(chat_format, words + end * ended)
            added = chat_format.render_observations(observations, sampled=sampled, ended=ended)
            assert [*start, *sampled, *added] == whole
