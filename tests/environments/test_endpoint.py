"""The endpoint with the clients that agents have: what they sample is recorded as it was sampled."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import anthropic
import httpx
import openai
import pytest
from agent_cases import ScriptedSampler, connect, finish, make_policy, run, serve, texts, trained
from chat_templates import make_tokenizer

from rlightning.environments.endpoint import Endpoint
from rlightning.environments.policy import RecordedPolicy
from rlightning.errors import ConfigError, EngineError, RequestRefusedError

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1,  "b": 2}}\n</tool_call>'
END = "<|im_end|>"
USER: dict[str, Any] = {"role": "user", "content": "1+2?"}
SYSTEM: dict[str, Any] = {"role": "system", "content": "Add."}


def make(*said: str, family: str = "qwen3", **arguments: Any) -> tuple[RecordedPolicy, ScriptedSampler, Any]:
    tokenizer = make_tokenizer(family)
    sampler = ScriptedSampler(tokenizer, *said, end=END, delay=arguments.pop("delay", 0.0))
    return make_policy(sampler, tokenizer, **arguments), sampler, tokenizer


async def ask(client: openai.AsyncOpenAI, messages: Sequence[Any], **arguments: Any) -> Any:
    return await client.chat.completions.create(model="any", messages=list(messages), **arguments)


def test_openai_sdk_with_tools_is_one_branch_as_sampled() -> None:
    policy, _, tokenizer = make(f"<think>\nhm\n</think>\n\nLet me.\n{CALL}\n{CALL}", " It is 3. ", "Yes.")

    async def use(client: openai.AsyncOpenAI) -> None:
        first = (await ask(client, [SYSTEM, USER], tools=[TOOL], tool_choice="auto")).choices[0]
        assert first.finish_reason == "tool_calls" and first.message.content == "Let me."
        assert first.message.reasoning_content == "hm"
        calls = first.message.tool_calls
        assert [json.loads(call.function.arguments) for call in calls] == [{"a": 1, "b": 2}] * 2
        # As frameworks send it back: nulls, other ids, arguments written anew, and without the reasoning.
        again = [
            {"id": f"x{i}", "type": "function", "function": {"name": "add", "arguments": '{"b":2.0, "a":1}'}}
            for i in range(2)
        ]
        said = {"role": "assistant", "content": " Let me. ", "refusal": None, "tool_calls": again, "audio": None}
        answers = [{"role": "tool", "tool_call_id": f"x{i}", "content": "3"} for i in range(2)]
        history = [SYSTEM, USER, said, *answers]
        second = (await ask(client, history, tools=[TOOL])).choices[0].message
        assert second.content == " It is 3. "
        third = [*history, {"role": "assistant", "content": "It is 3."}, {"role": "user", "content": "Sure?"}]
        await ask(client, third, tools=[TOOL])

    trajectory = run(policy, use)
    assert [branch.reason for branch in trajectory.branches] == ["start"]
    said = [f"<think>\nhm\n</think>\n\nLet me.\n{CALL}\n{CALL}{END}", f" It is 3. {END}", f"Yes.{END}"]
    assert trained(trajectory, tokenizer) == ["".join(said)]
    (text,) = texts(trajectory, tokenizer)
    answers = "\n<|im_start|>user" + "\n<tool_response>\n3\n</tool_response>" * 2 + f"{END}\n<|im_start|>assistant\n"
    assert text.endswith(f"{said[0]}{answers}{said[1]}\n<|im_start|>user\nSure?{END}\n<|im_start|>assistant\n{said[2]}")
    assert [turn.message["role"] for turn in trajectory.turns] == [
        *("system", "user", "assistant", "tool", "tool", "assistant", "user", "assistant")
    ]


def test_streams_are_read_by_the_sdk() -> None:
    policy, _, tokenizer = make(f"Let me. {CALL}", "3")

    async def use(client: openai.AsyncOpenAI) -> None:
        options = {"include_usage": True}
        chunks = [
            chunk
            async for chunk in await ask(
                client, [USER], tools=[TOOL], stream=True, stream_options=options, logprobs=True
            )
        ]
        assert chunks[-1].usage.completion_tokens == len(tokenizer(f"Let me. {CALL}{END}").input_ids)
        deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
        assert "".join(delta.content or "" for delta in deltas) == "Let me."
        (call,) = [delta.tool_calls[0] for delta in deltas if delta.tool_calls]
        assert call.function.name == "add" and chunks[-2].choices[0].finish_reason == "tool_calls"
        called = {"id": call.id, "type": "function", "function": {"name": "add", "arguments": call.function.arguments}}
        said = {"role": "assistant", "content": "Let me.", "tool_calls": [called]}
        answer = {"role": "tool", "tool_call_id": call.id, "content": "3"}
        arguments: Any = {"model": "any", "messages": [USER, said, answer], "tools": [TOOL]}
        async with client.chat.completions.stream(**arguments) as stream:
            final = (await stream.get_final_completion()).choices[0]
        assert (final.message.content, final.finish_reason) == ("3", "stop")

    assert len(run(policy, use).branches) == 1


SAID = {"role": "assistant", "content": "One."}
MORE = {"role": "user", "content": "More."}


@pytest.mark.parametrize(
    ("second", "tools", "reason"),
    [
        ([SYSTEM, USER, {**SAID, "content": "Two."}, MORE], None, "turn_edited"),
        ([SYSTEM, {**USER, "content": "2+2?"}, SAID, MORE], None, "message_edited"),
        ([SYSTEM, SAID, MORE], None, "messages_dropped"),
        ([SYSTEM, USER, {**USER, "content": "So far: 1."}, MORE], None, "compacted"),
        ([{**SYSTEM, "content": "Add!"}, USER, SAID, MORE], None, "system_changed"),
        ([SYSTEM, USER, SAID, MORE], [TOOL], "tools_changed"),
        ([SYSTEM, {"role": "user", "content": "You are another."}], None, "started_over"),
        ([SYSTEM, USER], None, "sampled_again"),
    ],
)
def test_rewritten_history_begins_a_branch_that_says_why(second: Any, tools: Any, reason: str) -> None:
    policy, _, tokenizer = make("One.", "Two.", "Three.")

    async def use(client: openai.AsyncOpenAI) -> None:
        await ask(client, [SYSTEM, USER])
        await ask(client, second, **({} if tools is None else {"tools": tools}))
        await ask(client, [SYSTEM, USER, SAID, MORE])  # the first one goes on as if nothing had been

    trajectory = run(policy, use)
    assert [branch.reason for branch in trajectory.branches] == ["start", reason]
    assert trained(trajectory, tokenizer) == [f"One.{END}Three.{END}", f"Two.{END}"]


@pytest.mark.parametrize("keeps", [True, False])
def test_reasoning_stays_or_goes_with_the_template(keeps: bool) -> None:
    policy, _, tokenizer = make("<think>\nhm\n</think>\n\nOne.", "Two.")

    async def use(client: openai.AsyncOpenAI) -> None:
        first = (await ask(client, [USER])).choices[0].message
        await ask(client, [USER, first, MORE])

    trajectory = run(policy, use, keeps_reasoning=keeps)
    reasons = [branch.reason for branch in trajectory.branches]
    assert reasons == (["start"] if keeps else ["start", "reasoning_dropped"])
    assert ("hm" in texts(trajectory, tokenizer)[-1]) == keeps


def test_reasoning_that_a_client_cut_off_is_told_apart() -> None:
    policy, _, _ = make("<think>hm</think>One.", "Two.", family="qwen2.5")
    policy.chat_format.parse = lambda token_ids, *_, **__: _plain(policy, token_ids)  # type: ignore[method-assign]

    async def use(client: openai.AsyncOpenAI) -> None:
        assert (await ask(client, [USER])).choices[0].message.content == "<think>hm</think>One."
        await ask(client, [USER, SAID, MORE])

    assert [branch.reason for branch in run(policy, use).branches] == ["start", "reasoning_dropped"]


def _plain(policy: Any, token_ids: Any) -> Any:
    from rlightning.environments import AssistantMessage

    return AssistantMessage(policy.chat_format.tokenizer.decode(token_ids).removesuffix(END))


def test_parallel_requests_and_choices_are_branches_of_their_own() -> None:
    policy, sampler, tokenizer = make(*(f"Number {i}." for i in range(6)), delay=0.05)

    async def use(client: openai.AsyncOpenAI) -> None:
        first = ask(client, [USER], n=2)
        second, third = ask(client, [USER]), ask(client, [MORE])
        answers = await asyncio.gather(first, second, third)
        assert len(answers[0].choices) == 2
        said = [{"role": "assistant", "content": choice.message.content} for choice in answers[0].choices]
        await asyncio.gather(*(ask(client, [USER, one, MORE]) for one in said))

    trajectory = run(policy, use)
    assert sorted(branch.reason for branch in trajectory.branches) == [
        *("sampled_again", "sampled_again", "start", "started_over")
    ]
    assert sorted("".join(trained(trajectory, tokenizer)).split(END)) == ["", *(f"Number {i}." for i in range(6))]
    assert len({sampling.seed for sampling in sampler.samplings}) == 5


def test_stop_strings_are_sampled_but_not_answered() -> None:
    policy, sampler, tokenizer = make("One. STOP", "Two.")
    sampler.end = ""

    async def use(client: openai.AsyncOpenAI) -> None:
        first = (await ask(client, [USER], stop="STOP", max_completion_tokens=7)).choices[0].message
        assert first.content == "One. "
        await ask(client, [USER, first, MORE])

    trajectory = run(policy, use)
    assert sampler.samplings[0].stop == ("STOP",) and sampler.samplings[0].max_new_tokens == 7
    assert f"One. STOP{END}\n<|im_start|>user\nMore." in texts(trajectory, tokenizer)[0]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"top_p": 0.5}, "top_p"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"temperature": 0.0}, "temperature"),
        ({"n": 1000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"guided_regex": "a"}}, "guided_regex"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content",
        ),
        ({"messages": [USER, SAID]}, "messages"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(arguments: dict[str, Any], named: str) -> None:
    policy, sampler, _ = make("One.")

    async def talk() -> None:
        async with serve(policy) as (session, url), connect(session, url) as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await ask(client, **{"messages": [USER], **arguments})
            assert caught.value.param == named and named.rpartition(".")[2] in caught.value.message
            assert not session.failure.done()

    asyncio.run(talk())
    assert not sampler.histories and not policy.recorder.turns


PERSON = {"type": "object", "properties": {"name": {"type": "string"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


def test_schemas_reach_the_engine_where_that_is_allowed() -> None:
    policy, sampler, _ = make("One.", "Two.", "Three.", "Four.")
    sampler.follows_schemas = True

    async def use(client: openai.AsyncOpenAI) -> None:
        await ask(client, [USER], response_format={"type": "json_object"})
        await ask(client, [USER], response_format=SCHEMA)
        form: Any = {"format": {"type": "json_schema", "name": "person", "schema": PERSON}}
        await client.responses.create(model="any", input="1+2?", text=form)
        await ask(client, [USER], response_format={"type": "text"})

    trajectory = run(policy, use, allowed=["response_format"])
    schemas = [None if one.json_schema is None else json.loads(one.json_schema) for one in sampler.samplings]
    assert schemas == [{"type": "object"}, PERSON, PERSON, None]
    assert trajectory.metrics == {"constrained_turns": 3.0}


@pytest.mark.parametrize(
    ("follows", "form", "reason"),
    [
        (False, SCHEMA, "has no structured output"),
        (True, {"type": "json_schema"}, "has to be of type text, json_object, or json_schema with a schema"),
        (True, SCHEMA, r"the engine does not take the schema \(.*no such type"),
    ],
)
def test_a_schema_that_is_not_followed_is_the_clients_error(follows: bool, form: Any, reason: str) -> None:
    policy, sampler, _ = make("One.")
    sampler.follows_schemas = follows
    sampler.error = RequestRefusedError("ValueError: no such type")

    async def talk() -> None:
        async with (
            serve(policy, allowed=["response_format"]) as (session, url),
            connect(session, url) as client,
        ):
            with pytest.raises(openai.BadRequestError, match=reason) as caught:
                await ask(client, [USER], response_format=form)
            assert caught.value.param == "response_format" and not session.failure.done()

    asyncio.run(talk())
    assert not policy.recorder.turns


def test_only_response_format_may_be_allowed() -> None:
    with pytest.raises(ConfigError, match=r"^endpoint\.allowed=\['top_p'\] may have 'response_format' alone\.$"):
        Endpoint(allowed=["top_p"])


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
ANTHROPIC_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}]}, "image_url"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ("/v1/responses", {"input": [{"type": "input_image", "image_url": "x"}]}, "input_image"),
        ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": [ANTHROPIC_IMAGE]}]}, "image"),
        (
            "/v1/messages",
            {
                "max_tokens": 9,
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "content": [ANTHROPIC_IMAGE]}]},
                ],
            },
            "image",
        ),
        ("/v1/completions", {"prompt": [IMAGE]}, "image_url"),
        ("/inference/v1/generate", {"token_ids": [1], "features": {"image": "AA=="}}, "features"),
    ],
)
def test_images_are_refused_in_a_line_by_all_routes(path: str, body: dict[str, Any], kind: str) -> None:
    policy, sampler, _ = make("One.")

    async def talk() -> None:
        async with serve(policy) as (session, url), httpx.AsyncClient(base_url=url) as client:
            client.headers["Authorization"] = f"Bearer {session.key}"
            answer = await client.post(path, json={"model": "any", **body})
            message = answer.json()["error"]["message"]
            assert answer.status_code == 400 and kind in message and "\n" not in message and len(message) < 300

    asyncio.run(talk())
    assert not sampler.histories


def test_ignored_parameters_are_passed_over() -> None:
    policy, sampler, _ = make("One.")

    async def use(client: openai.AsyncOpenAI) -> None:
        await ask(client, [USER], top_p=0.5, temperature=0.0, user="me")

    run(policy, use, ignored=["top_p", "temperature"])
    assert (sampler.samplings[0].top_p, sampler.samplings[0].temperature) == (1.0, 1.0)


def test_a_trajectory_is_sampled_at_one_temperature() -> None:
    policy, sampler, _ = make("One.", "Two.", "Three.")

    async def use(client: openai.AsyncOpenAI) -> None:
        await ask(client, [USER], temperature=0.7)
        with pytest.raises(openai.BadRequestError, match="a trajectory has one temperature"):
            await ask(client, [USER], temperature=0.8)

    trajectory = run(policy, use)
    assert sampler.samplings[0].temperature == trajectory.prompt.temperature == 0.7
    assert len(sampler.samplings) == 1


def test_seeds_repeat_within_a_trajectory_alone() -> None:
    policies = [make("One.", "Two.") for _ in range(2)]
    policies[1][0]._number = 1

    async def use(client: openai.AsyncOpenAI) -> None:
        await asyncio.gather(ask(client, [USER], seed=5), ask(client, [USER], seed=5))

    seeds = []
    for policy, sampler, _ in policies:
        run(policy, use)
        seeds += [sampling.seed for sampling in sampler.samplings]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]


def test_keys_sizes_and_paths_are_checked() -> None:
    policy, sampler, _ = make("One.")

    async def talk() -> None:
        async with serve(policy, max_request_bytes=2000) as (session, url), httpx.AsyncClient(base_url=url) as client:
            assert url.startswith("http://127.0.0.1:")
            body = {"model": "any", "messages": [USER]}
            for key in ("-", "wrong", f"sk-{session.id}-wrong", session.key[:-1]):
                answer = await client.post(
                    "/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
                )
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
            client.headers["Authorization"] = f"Bearer {session.key}"
            models = (await client.get("/v1/models")).json()["data"]
            assert [(one["id"], one["max_model_len"]) for one in models] == [(session.model, 4096)]
            long = {**body, "messages": [{**USER, "content": "x" * 2000}]}
            assert (await client.post("/v1/chat/completions", json=long)).status_code == 413
            assert (await client.post("/v1/chat/completions", content="{")).status_code == 400
            assert (await client.post("/v1/nothing", json=body)).json()["error"]["type"] == "not_found_error"
        async with serve(policy) as (other, url), httpx.AsyncClient(base_url=url) as client:
            headers = {"Authorization": f"Bearer {session.key}"}  # its session is over
            assert (await client.post("/v1/chat/completions", json=body, headers=headers)).status_code == 401
            assert other.key != session.key

    asyncio.run(talk())
    assert not sampler.histories


def test_a_client_that_goes_away_ends_its_request() -> None:
    policy, sampler, tokenizer = make("Never.", "One.", "Two.", delay=0.3)

    async def talk() -> None:
        async with serve(policy) as (session, url):
            async with connect(session, url, timeout=0.05, max_retries=0) as hasty:
                with pytest.raises(openai.APITimeoutError):
                    await ask(hasty, [USER])
            async with connect(session, url) as client:
                await ask(client, [USER])
                await ask(client, [USER, SAID, MORE])
            assert (session.num_abandoned, sampler.cancelled) == (1, 1)

    asyncio.run(talk())
    trajectory = finish(policy)
    assert trained(trajectory, tokenizer)[-1] == f"One.{END}Two.{END}" and len(trajectory.branches) == 1


def test_a_failure_of_the_engine_ends_the_session() -> None:
    policy, sampler, _ = make("One.")
    sampler.error = EngineError("The engine is gone.")

    async def talk() -> None:
        async with serve(policy) as (session, url), connect(session, url) as client:
            for _ in range(2):
                with pytest.raises(openai.InternalServerError):
                    await ask(client, [USER])
            assert len(sampler.histories) == 1  # the client's own retries are told not to be

    with pytest.raises(EngineError, match=r"^The engine is gone\.$"):
        asyncio.run(talk())


def test_no_room_is_a_context_length_error() -> None:
    policy, _, _ = make("One.", max_length=40)

    async def talk() -> None:
        async with serve(policy) as (session, url), connect(session, url) as client:
            with pytest.raises(openai.BadRequestError, match="maximum context length is 40 tokens") as caught:
                await ask(client, [{**USER, "content": "x" * 60}])
            assert caught.value.code == "context_length_exceeded" and not session.failure.done()

    asyncio.run(talk())
    assert policy.has_reached_limit


def test_tokens_go_in_and_out_as_they_are() -> None:
    policy, sampler, tokenizer = make("One.", "Two.", "Three.")

    async def talk() -> None:
        async with serve(policy) as (session, url), httpx.AsyncClient(base_url=url) as client:
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


def test_a_stop_string_that_the_client_writes_itself_is_read_once() -> None:
    policy, sampler, tokenizer = make("Thought\nObservation:", "Two.")
    sampler.end = ""

    async def use(client: openai.AsyncOpenAI) -> None:
        first = await client.completions.create(model="any", prompt="A:", stop="\nObservation:")
        assert first.choices[0].text == "Thought"
        await client.completions.create(model="any", prompt="A:Thought\nObservation: 42")

    trajectory = run(policy, use)
    assert texts(trajectory, tokenizer) == ["A:Thought\nObservation: 42Two."]


@pytest.mark.parametrize(
    "message", [{"role": "assistant", "content": "1", "tool_calls": 5}, {"role": "user", "content": "\ud800"}]
)
def test_a_malformed_message_is_the_clients_error_and_the_session_goes_on(message: dict[str, Any]) -> None:
    policy, _, _ = make("One.")

    async def use(client: openai.AsyncOpenAI) -> None:
        headers = {"Authorization": f"Bearer {client.api_key}"}
        async with httpx.AsyncClient(base_url=str(client.base_url), headers=headers) as http:
            answer = await http.post("chat/completions", content=json.dumps({"messages": [message, USER]}))
        assert answer.status_code == 400 and "messages" in answer.json()["error"]["message"]
        await ask(client, [USER])

    assert run(policy, use).status == "finished"


def test_requests_beyond_the_limit_are_asked_again_by_the_sdk() -> None:
    policy, _, _ = make(*["One."] * 6, delay=0.05)

    async def use(client: openai.AsyncOpenAI) -> None:
        await asyncio.gather(*(ask(client, [USER]) for _ in range(6)))

    assert run(policy, use, max_requests=4).status == "finished"


def test_a_refused_request_leaves_the_temperature_open() -> None:
    policy, sampler, _ = make("One.", max_length=40)

    async def use(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await ask(client, [{**USER, "content": "x" * 60}], temperature=0.5)
        await ask(client, [USER], temperature=0.9)

    run(policy, use)
    assert sampler.samplings[-1].temperature == 0.9


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_sdk_with_tools_is_one_branch(stream: bool) -> None:
    policy, _, tokenizer = make(f"<think>\nhm\n</think>\n\nLet me.\n{CALL}", "It is 3.")
    schema = TOOL["function"]
    tool = {"name": "add", "description": schema["description"], "input_schema": schema["parameters"]}

    async def talk() -> None:
        async with (
            serve(policy) as (session, url),
            anthropic.AsyncAnthropic(base_url=url, api_key=session.key) as client,
        ):
            arguments: Any = {"model": "any", "max_tokens": 64, "system": "Add.", "tools": [tool]}

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


@pytest.mark.parametrize("is_stored", [False, True])
def test_responses_with_tools_are_one_branch(is_stored: bool) -> None:
    policy, _, tokenizer = make(f"<think>\nhm\n</think>\n\nLet me.\n{CALL}", "It is 3.", "Yes.")
    tool = {"type": "function", "strict": False, **TOOL["function"]}

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


def test_calls_that_cannot_be_read_are_text() -> None:
    policy, _, _ = make("Hm. <tool_call>\n{no}\n</tool_call>", CALL)

    async def use(client: openai.AsyncOpenAI) -> None:
        first = (await ask(client, [USER], tools=[TOOL])).choices[0]
        assert first.message.content == "Hm. <tool_call>\n{no}\n</tool_call>" and first.message.tool_calls is None
        assert first.finish_reason == "stop"
        second = (await ask(client, [USER, first.message, MORE], tools=[TOOL], tool_choice="none")).choices[0]
        assert second.message.content == CALL and second.message.tool_calls is None

    assert [branch.reason for branch in run(policy, use).branches] == ["start"]


def test_an_address_that_is_taken_is_one_line() -> None:
    async def talk() -> None:
        policy, _, _ = make()
        async with serve(policy) as (_, url):
            with pytest.raises(
                ConfigError, match=r"^endpoint\.host=127\.0\.0\.1, endpoint\.port=\d+ cannot be listened"
            ):
                async with serve(policy, port=int(url.rpartition(":")[2])):
                    pass

    asyncio.run(talk())
