"""Streams of the endpoint: text comes while it is sampled, and what is recorded is what was sampled."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from importlib import import_module
from typing import Any

import openai
import pytest
from agent_cases import StreamingSampler, connect, finish, run, serve, trained
from chat_templates import ADD
from endpoint_cases import CALL, END, USER, ask
from endpoint_cases import make as make_scripted
from waiting import PATIENCE_SECONDS

from rlightning.errors import EngineError

SAID = f"<think>\nhm, 1\u00bd\n</think>\n\nLet me \U0001f914 see.\n{CALL}"
REASONING, CONTENT = "hm, 1\u00bd", "Let me \U0001f914 see."


make = partial(make_scripted, kind=StreamingSampler)
Parts = AsyncIterator[tuple[str, str]]


async def read_chat(base_url: str, key: str) -> Parts:
    """The kinds and texts of what a client gets, one after the other."""
    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=key) as client:
        options: Any = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True}
        async for chunk in await ask(client, [USER], tools=[ADD], **options):
            for choice in chunk.choices:
                yield "reasoning", getattr(choice.delta, "reasoning_content", None) or ""
                yield "content", choice.delta.content or ""
                for call in choice.delta.tool_calls or []:
                    yield "call", call.function.arguments
                if choice.finish_reason:
                    yield "end", choice.finish_reason
                    yield "num_logprobs", str(len(choice.logprobs.content))
            if chunk.usage:
                yield "usage", str(chunk.usage.completion_tokens)


async def read_responses(base_url: str, key: str) -> Parts:
    kinds = {
        "response.reasoning_text.delta": "reasoning",
        "response.output_text.delta": "content",
        "response.function_call_arguments.delta": "call",
    }
    tool: Any = {"type": "function", "strict": False, **ADD["function"]}
    async with (
        openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=key) as client,
        client.responses.stream(model="any", input="1+2?", tools=[tool]) as events,
    ):
        async for event in events:
            if event.type in kinds:
                yield kinds[event.type], str(event.delta)  # type: ignore[union-attr]
        final = await events.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output_text == CONTENT and final.usage is not None
    yield "usage", str(final.usage.output_tokens)


async def read_messages(base_url: str, key: str) -> Parts:
    import anthropic  # which takes 2 seconds

    tool = {"name": "add", "description": "Add.", "input_schema": ADD["function"]["parameters"]}
    kinds = {"thinking": "reasoning", "text": "content"}
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key=key) as client:
        arguments: Any = {"model": "any", "max_tokens": 999, "messages": [USER], "tools": [tool]}
        async with client.messages.stream(**arguments) as events:
            async for event in events:
                if event.type in kinds:
                    yield kinds[event.type], getattr(event, event.type)
            final = await events.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    yield "call", json.dumps(final.content[2].input)  # type: ignore[union-attr]
    yield "end", "tool_calls" if final.stop_reason == "tool_use" else str(final.stop_reason)
    yield "usage", str(final.usage.output_tokens)


async def read_texts(base_url: str, key: str) -> Parts:
    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=key) as client:
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        async for chunk in await client.completions.create(model="any", prompt="1+2?", **options):
            for choice in chunk.choices:
                yield "content", choice.text
            if chunk.usage:
                yield "usage", str(chunk.usage.completion_tokens)


Read = Callable[[str, str], Parts]


@pytest.mark.long
@pytest.mark.parametrize("read", [read_chat, read_responses, read_messages, read_texts])
def test_text_comes_while_it_is_sampled(read: Read) -> None:
    policy, sampler, tokenizer = make(SAID)
    got: dict[str, list[str]] = {}

    async def talk() -> None:
        async with serve(policy) as (session, url):
            async for kind, text in read(url, session.key):
                got.setdefault(kind, []).append(text)
                if CONTENT in "".join(got.get("content", ())):
                    sampler.released.set()  # the text was there before the sampler was done

    asyncio.run(asyncio.wait_for(talk(), PATIENCE_SECONDS))
    joined = {kind: "".join(texts) for kind, texts in got.items()}
    if read is read_texts:
        assert joined["content"] == SAID
    else:
        assert (joined["reasoning"], joined["content"]) == (REASONING, CONTENT)
        assert json.loads(joined["call"]) == {"a": 1, "b": 2} and len(got["call"]) == 1
        assert joined.get("end", "tool_calls") == "tool_calls"
    assert len([text for text in got["content"] if text]) > 3
    assert not any("\ufffd" in text for texts in got.values() for text in texts)
    num_tokens = len(tokenizer(SAID + END).input_ids)
    assert joined["usage"] == str(num_tokens) == joined.get("num_logprobs", joined["usage"])
    assert trained(finish(policy), tokenizer) == [SAID + END]


def test_choices_of_a_stream_are_told_apart() -> None:
    policy, sampler, tokenizer = make("One two three.", "Four five six.")
    sampler.released.set()
    texts = ["", ""]

    async def use(client: openai.AsyncOpenAI) -> None:
        async for chunk in await ask(client, [USER], n=2, stream=True):
            (choice,) = chunk.choices
            texts[choice.index] += choice.delta.content or ""

    trajectory = run(policy, use)
    assert texts == ["One two three.", "Four five six."]
    assert trained(trajectory, tokenizer) == [f"One two three.{END}", f"Four five six.{END}"]


def test_an_empty_first_choice_of_a_stream_is_read_by_the_sdk() -> None:
    policy, sampler, _ = make("", "hi")
    sampler.released.set()

    async def use(client: openai.AsyncOpenAI) -> None:
        arguments: Any = {"model": "any", "messages": [USER], "n": 2}
        async with client.chat.completions.stream(**arguments) as events:
            choices = (await events.get_final_completion()).choices
        assert [choice.message.content or "" for choice in choices] == ["", "hi"]

    run(policy, use)


def test_a_streamed_turn_is_continued() -> None:
    policy, sampler, tokenizer = make("One. STOP", "Two.")
    sampler.released.set()

    async def use(client: openai.AsyncOpenAI) -> None:
        said = ""
        async for chunk in await ask(client, [USER], stop=["STOP"], stream=True):
            said += chunk.choices[0].delta.content or ""
        assert said == "One. "
        await ask(client, [USER, {"role": "assistant", "content": said}, USER])

    trajectory = run(policy, use)
    assert [branch.reason for branch in trajectory.branches] == ["start"]
    assert trained(trajectory, tokenizer) == [f"One. STOP{END}Two.{END}"]


@pytest.mark.parametrize("read", [read_chat, read_messages])
@pytest.mark.long
def test_client_that_leaves_a_stream_ends_its_request(read: Read) -> None:
    policy, sampler, tokenizer = make("Never more.", "One.")

    async def talk() -> None:
        async with serve(policy) as (session, url):
            parts = read(url, session.key)
            await read_content(parts)
            await parts.aclose()  # type: ignore[attr-defined]
            await sampler.ended.wait()
            assert (session.num_abandoned, sampler.cancelled) == (1, 1)
            sampler.released.set()
            async with connect(session, url) as client:
                await ask(client, [USER])

    asyncio.run(asyncio.wait_for(talk(), PATIENCE_SECONDS))
    assert trained(finish(policy), tokenizer) == [f"One.{END}"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("read", "package"),
    [(read_chat, "openai"), (read_responses, "openai"), (read_messages, "anthropic")],
)
def test_failure_amid_a_stream_ends_request_and_session(read: Read, package: str) -> None:
    policy, sampler, _ = make(SAID)
    sampler.error = EngineError("The engine is gone.")
    got: list[str] = []

    async def talk() -> None:
        async with serve(policy) as (session, url):
            with pytest.raises(import_module(package).APIError, match=r"The engine is gone"):
                async for name, text in read(url, session.key):
                    got.append(text if name == "content" else "")
                    if "".join(got).startswith(CONTENT):
                        sampler.released.set()

    with pytest.raises(EngineError, match=r"^The engine is gone\.$"):
        asyncio.run(asyncio.wait_for(talk(), PATIENCE_SECONDS))
    assert not policy.recorder.turns


def test_a_session_that_ends_ends_its_streams() -> None:
    policy, sampler, _ = make("One two three.")

    async def talk() -> None:
        async with serve(policy) as (session, url):
            parts = read_chat(url, session.key)
            await read_content(parts)
        with pytest.raises(openai.OpenAIError):
            async for _ in parts:
                pass
        assert sampler.cancelled == 1

    asyncio.run(asyncio.wait_for(talk(), PATIENCE_SECONDS))


async def read_content(parts: Parts) -> None:
    """Read until there is text."""
    async for kind, text in parts:
        if kind == "content" and text:
            return
