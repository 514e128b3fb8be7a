"""The endpoint's other routes: tokens, texts, Anthropic's messages and OpenAI's responses."""

import asyncio
from typing import Any

import httpx
import openai
import pytest
from agent_cases import finish, run, serve, texts, trained
from chat_templates import ADD
from endpoint_cases import CALL, END, USER, make
from waiting import PATIENCE_SECONDS

from rlightning.environments.endpoint import parameters
from rlightning.environments.policy import RecordedPolicy

ANTHROPIC_TOOL = {
    "name": "add",
    "description": ADD["function"]["description"],
    "input_schema": ADD["function"]["parameters"],
}


@pytest.mark.long
def test_tokens_go_in_and_out_as_they_are() -> None:
    policy, sampler, tokenizer = make("One.", "Two.", "Three.")

    async def talk() -> None:
        async with serve(policy) as (session, url), httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as client:
            client.headers["Authorization"] = f"Bearer {session.key}"
            parameters = {"max_tokens": 9, "stop_token_ids": [7], "logprobs": 1, "skip_special_tokens": False}
            history = [5, 6, 7]

            async def generate(token_ids: list[int]) -> list[int]:
                body = {"model": "any", "token_ids": token_ids, "sampling_params": parameters, "cache_salt": "x"}
                choice = (await client.post("/inference/v1/generate", json=body)).json()["choices"][0]
                names = [one["token"] for one in choice["logprobs"]["content"]]
                assert names == [f"token_id:{token}" for token in choice["token_ids"]]
                assert {one["logprob"] for one in choice["logprobs"]["content"]} == {-0.5}
                assert choice["finish_reason"] == "stop"
                return list(choice["token_ids"])

            first = await generate(history)
            await generate([*history, *first, 8, 9])
            await generate([*history, 8])
            body = {"token_ids": [5], "sampling_params": {"top_k": 5}}
            assert (await client.post("/inference/v1/generate", json=body)).json()["error"]["param"] == "top_k"
            assert sampler.samplings[0].stop_token_ids == (7,) and sampler.samplings[0].max_new_tokens == 9

    asyncio.run(talk())
    trajectory = finish(policy)
    assert [branch.reason for branch in trajectory.branches] == ["start", "history_edited"]
    assert trained(trajectory, tokenizer) == [f"One.{END}Two.{END}", f"Three.{END}"]


def test_texts_go_on_from_their_tokens() -> None:
    policy, sampler, tokenizer = make("One.", "Two.")
    sampler.end = ""

    async def use(client: openai.AsyncOpenAI) -> None:
        first = (await client.completions.create(model="any", prompt="A:", logprobs=1)).choices[0]
        assert "".join(first.logprobs.tokens) == first.text == "One."  # type: ignore[union-attr,arg-type]
        await client.completions.create(model="any", prompt=f"A:{first.text}\nB:")

    trajectory = run(policy, use)
    assert texts(trajectory, tokenizer) == ["A:One.\nB:Two."] and trained(trajectory, tokenizer) == ["One.Two."]


def test_empty_text_is_sampled_again_from_its_prompt() -> None:
    policy, _, tokenizer = make("", "Two.")

    async def use(client: openai.AsyncOpenAI) -> None:
        for text in ("", "Two."):
            assert (await client.completions.create(model="any", prompt="A:")).choices[0].text == text

    trajectory = run(policy, use)
    assert texts(trajectory, tokenizer) == [f"A:{END}", f"A:Two.{END}"]
    assert [branch.reason for branch in trajectory.branches] == ["start", "sampled_again"]


def test_responses_keep_each_message_of_the_assistants() -> None:
    policy, _, tokenizer = make("Three.")
    said = [{"role": "assistant", "content": text} for text in ("One.", "Two.")]

    async def use(client: openai.AsyncOpenAI) -> None:
        await client.responses.create(model="any", input=[USER, *said, {"role": "user", "content": "More."}])  # type: ignore[list-item]

    (text,) = texts(run(policy, use), tokenizer)
    assert "One." in text and "Two." in text


@pytest.mark.parametrize(
    ("route", "settings"),
    [
        ("chat/completions", {"messages": [USER], "reasoning_effort": "low", "verbosity": "low"}),
        ("responses", {"input": "1+2?", "reasoning": {"effort": "none"}, "text": {"verbosity": "low"}}),
        ("messages", {"messages": [USER], "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 1024}}),
        ("messages", {"messages": [USER], "max_tokens": 9, "output_config": {"effort": "low"}}),
    ],
)
def test_settings_of_how_much_is_reasoned_have_no_effect(
    route: str, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    policy, sampler, _ = make("One.", "Two.")
    parameters.log_left_to_template.cache_clear()
    with caplog.at_level("INFO", "rlightning"):
        assert [post(policy, route, settings).status_code for _ in range(2)] == [200, 200]
    assert sampler.samplings[0].json_schema is None
    told = {"reasoning_effort", "verbosity", "reasoning", "thinking"} & settings.keys()
    told |= {f"{name}.{key}" for name in ("output_config", "text") for key in settings.get(name, ())}
    assert [f"set '{name}', without effect" in caplog.text for name in told] == [True] * len(told)
    assert caplog.text.count("without effect") == len(told)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"text": {"colour": "red"}}, "text={'colour': 'red'}"),
        ({"text": {"format": 5}}, "text.format=5"),
        ({"response_format": {"type": "json_object"}}, "response_format other than text is not supported"),
        ({"truncation": "auto"}, "truncation='auto' is not supported, other than 'disabled'"),
    ],
)
def test_responses_refuse_what_they_cannot_honour(change: dict[str, Any], named: str) -> None:
    policy, sampler, _ = make("One.")
    answer = post(policy, "responses", {"input": "1+2?", **change})
    assert answer.status_code == 400 and named in answer.json()["error"]["message"]
    assert not sampler.histories


def post(policy: RecordedPolicy, route: str, body: dict[str, Any]) -> httpx.Response:
    """The response to a request."""

    async def talk() -> httpx.Response:
        async with serve(policy) as (session, url), httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as client:
            client.headers["Authorization"] = f"Bearer {session.key}"
            return await client.post(f"/v1/{route}", json=body)

    return asyncio.run(talk())


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "disable_parallel_tool_use"),
        ({"output_config": {"effort": "low", "format": {"type": "json_schema"}}}, "output_config"),
        ({"output_config": 5}, "output_config"),
    ],
)
def test_messages_refuse_what_they_cannot_honour(change: Any, param: str) -> None:
    policy, sampler, _ = make("One.")

    async def talk() -> None:
        async with serve(policy) as (session, url), httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as client:
            client.headers["x-api-key"] = session.key
            answer = await client.post("/v1/messages", json={"max_tokens": 9, "messages": [USER], **change})
            assert answer.status_code == 400 and param in answer.json()["error"]["message"]
            assert session.num_refused == 1
            assert (await client.post("/v1/messages/batches", json={})).json()["type"] == "error"

    asyncio.run(talk())
    assert not sampler.histories


def test_stop_string_of_the_client_is_read_once() -> None:
    policy, sampler, tokenizer = make("Thought\nObservation:", "Two.")
    sampler.end = ""

    async def use(client: openai.AsyncOpenAI) -> None:
        first = await client.completions.create(model="any", prompt="A:", stop="\nObservation:")
        assert first.choices[0].text == "Thought"
        await client.completions.create(model="any", prompt="A:Thought\nObservation: 42")

    trajectory = run(policy, use)
    assert texts(trajectory, tokenizer) == ["A:Thought\nObservation: 42Two."]


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_sdk_with_tools_is_one_branch(stream: bool) -> None:
    import anthropic  # which takes 2 seconds

    policy, _, tokenizer = make(f"<think>\nhm\n</think>\n\nLet me.\n{CALL}", "It is 3.")

    async def talk() -> None:
        async with (
            serve(policy) as (session, url),
            anthropic.AsyncAnthropic(base_url=url, api_key=session.key) as client,
        ):
            arguments: Any = {"model": "any", "max_tokens": 64, "system": "Add.", "tools": [ANTHROPIC_TOOL]}

            async def create(messages: Any) -> Any:
                if not stream:
                    return await client.messages.create(messages=messages, **arguments)
                async with client.messages.stream(messages=messages, **arguments) as events:
                    return await events.get_final_message()

            first = await create([USER])
            assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
            assert first.stop_reason == "tool_use" and first.content[2].input == {"a": 1, "b": 2}
            result = {"type": "tool_result", "tool_use_id": first.content[2].id, "content": "3"}
            second = await create(
                [USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            )
            assert second.content[0].text == "It is 3." and second.stop_reason == "end_turn"
            with pytest.raises(anthropic.BadRequestError, match="top_k=3 is not supported"):
                await client.messages.create(messages=[USER], extra_body={"top_k": 3}, **arguments)  # type: ignore[list-item]
            with pytest.raises(anthropic.AuthenticationError):
                await client.with_options(api_key="no").messages.create(messages=[USER], **arguments)  # type: ignore[list-item]

    asyncio.run(talk())
    assert trained(finish(policy), tokenizer) == [f"<think>\nhm\n</think>\n\nLet me.\n{CALL}{END}It is 3.{END}"]


@pytest.mark.long
@pytest.mark.parametrize("is_beta", [False, True])
def test_count_of_tokens_is_that_of_the_prompt(is_beta: bool) -> None:
    import anthropic  # which takes 2 seconds

    policy, sampler, _ = make(f"<think>\nhm\n</think>\n\nLet me.\n{CALL}", "It is 3.", "Yes.")

    async def talk() -> None:
        async with (
            serve(policy) as (session, url),
            anthropic.AsyncAnthropic(base_url=url, api_key=session.key) as client,
        ):
            api: Any = client.beta.messages if is_beta else client.messages
            arguments: Any = {"model": "any", "system": "Add.", "tools": [ANTHROPIC_TOOL]}
            messages: list[Any] = [USER]
            for _ in range(3):
                for _ in range(2):
                    count = (await api.count_tokens(messages=messages, **arguments)).input_tokens
                turn = await api.create(messages=messages, max_tokens=64, **arguments)
                assert count == turn.usage.input_tokens == len(sampler.histories[-1])
                results = [
                    {"type": "tool_result", "tool_use_id": block.id, "content": "3"}
                    for block in turn.content
                    if block.type == "tool_use"
                ]
                more = {"role": "user", "content": results or "Sure?"}
                messages += [{"role": "assistant", "content": turn.content}, more]
            other = (
                await api.count_tokens(messages=[{"role": "user", "content": "x" * 9000}], model="any")
            ).input_tokens
            assert other > policy.max_length
            with pytest.raises(anthropic.BadRequestError, match="image is not supported"):
                await api.count_tokens(messages=[{"role": "user", "content": [{"type": "image"}]}], model="any")

    asyncio.run(talk())
    trajectory = finish(policy)
    assert [branch.reason for branch in trajectory.branches] == ["start"] and len(sampler.histories) == 3
    assert [turn.message["role"] for turn in trajectory.turns] == [
        *("system", "user", "assistant", "tool", "assistant", "user", "assistant")
    ]


@pytest.mark.long
@pytest.mark.parametrize("is_stored", [False, True])
def test_responses_with_tools_are_one_branch(is_stored: bool) -> None:
    policy, _, tokenizer = make(f"<think>\nhm\n</think>\n\nLet me.\n{CALL}", "It is 3.", "Yes.")
    tool = {"type": "function", "strict": False, **ADD["function"]}

    async def use(client: openai.AsyncOpenAI) -> None:
        arguments: Any = {"model": "any", "instructions": "Add.", "tools": [tool]}
        first = await client.responses.create(input="1+2?", **arguments)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        call: Any = first.output[2]
        answer: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        if is_stored:
            second = await client.responses.create(input=[answer], previous_response_id=first.id, **arguments)
        else:
            items: Any = [USER, *(item.model_dump() for item in first.output), answer]
            async with client.responses.stream(input=items, **arguments) as stream:
                second = await stream.get_final_response()
        assert second.output_text == "It is 3." and second.usage is not None
        more: Any = {"input": "Sure?", "previous_response_id": second.id}
        assert (await client.responses.create(**more, **arguments)).output_text == "Yes."

    trajectory = run(policy, use)
    assert trained(trajectory, tokenizer) == [f"<think>\nhm\n</think>\n\nLet me.\n{CALL}{END}It is 3.{END}Yes.{END}"]
