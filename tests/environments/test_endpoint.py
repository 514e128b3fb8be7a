"""The endpoint: keys, limits, schemas, temperature and seeds, failures, and what all of its routes refuse."""

import asyncio
import json
import re
from typing import Any, cast

import httpx
import openai
import pytest
from agent_cases import connect, finish, run, serve, trained
from attempts import CannedPolicy
from endpoint_cases import END, MORE, SAID, USER, ask, get_refusal, make
from waiting import PATIENCE_SECONDS

from rlightning.environments.endpoint import Endpoint
from rlightning.environments.endpoint.errors import EndpointFullError
from rlightning.errors import ConfigError, EngineError, RequestRefusedError

PERSON = {"type": "object", "properties": {"name": {"type": "string"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("follows", "form", "reason"),
    [
        (False, SCHEMA, "has no structured output"),
        (True, {"type": "json_schema"}, "has to be of type text, json_object, or json_schema with a schema"),
        (True, SCHEMA, r"the engine does not take the schema \(.*no such type"),
    ],
)
def test_refused_schema_is_the_clients_error(follows: bool, form: Any, reason: str) -> None:
    policy, sampler, _ = make("One.")
    sampler.follows_schemas = follows
    sampler.error = RequestRefusedError("ValueError: no such type")
    error = get_refusal(policy, allowed=["response_format"], response_format=form)
    assert error.param == "response_format" and re.search(reason, error.message)
    assert not policy.recorder.turns


def test_unknown_parameter_cannot_be_allowed() -> None:
    with pytest.raises(
        ConfigError, match=r"^endpoint\.allowed=\['stop', 'top_p'\] may have response_format, top_p, top"
    ):
        Endpoint(allowed=["top_p", "stop"])


TRUNCATIONS = [
    ({"top_p": 0.5}, (0.5, 20, 0.0), 2.0),
    ({"min_p": 0.1}, (1.0, 20, 0.1), 2.0),
    ({"top_k": -1}, (1.0, 0, 0.0), 1.0),  # only the run's own turn is truncated
]


@pytest.mark.parametrize(("given", "truncation", "num_truncated"), TRUNCATIONS)
def test_truncation_is_refused_or_the_turns_own(
    given: dict[str, float], truncation: tuple[float, int, float], num_truncated: float
) -> None:
    (name,) = given
    policy, sampler, _ = make("One.", "Two.", sampling={"top_k": 20})
    error = get_refusal(policy, extra_body=given)
    assert error.param == name and "or to those that it honours (environment.endpoint.allowed)" in error.message

    async def use(client: openai.AsyncOpenAI) -> None:
        await ask(client, [USER], extra_body=given)
        await ask(client, [USER, SAID, MORE])
        with pytest.raises(openai.BadRequestError, match=f"{name}=-2"):
            await ask(client, [USER], extra_body={name: -2})

    trajectory = run(policy, use, allowed=[name])
    assert [sampling.truncation for sampling in sampler.samplings] == [truncation, (1.0, 20, 0.0)]
    assert trajectory.metrics == {"truncated_turns": num_truncated}


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
ANTHROPIC_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


@pytest.mark.long
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
def test_images_are_refused_by_all_routes(path: str, body: dict[str, Any], kind: str) -> None:
    policy, sampler, _ = make("One.")

    async def talk() -> None:
        async with serve(policy) as (session, url), httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as client:
            client.headers["Authorization"] = f"Bearer {session.key}"
            answer = await client.post(path, json={"model": "any", **body})
            message = answer.json()["error"]["message"]
            assert answer.status_code == 400 and kind in message and "\n" not in message and len(message) < 300

    asyncio.run(talk())
    assert not sampler.histories


def test_a_trajectory_is_sampled_at_one_temperature() -> None:
    policy, sampler, _ = make("One.", max_length=40)

    async def use(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await ask(client, [{**USER, "content": "x" * 60}], temperature=0.5)  # which leaves it open
        await ask(client, [USER], temperature=0.7)
        with pytest.raises(openai.BadRequestError, match="a trajectory has one temperature"):
            await ask(client, [USER], temperature=0.8)

    assert run(policy, use).prompt.temperature == 0.7
    assert [sampling.temperature for sampling in sampler.samplings] == [0.7]


@pytest.mark.long
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


@pytest.mark.long
def test_keys_sizes_and_paths_are_checked() -> None:
    policy, sampler, _ = make("One.")

    async def talk() -> None:
        async with (
            serve(policy, max_request_bytes=2000) as (session, url),
            httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as client,
        ):
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
            assert (await client.get("/v1/models/")).json()["data"] == models
            assert (await client.head("/v1/models")).status_code == 200
            long = {**body, "messages": [{**USER, "content": "x" * 2000}]}
            assert (await client.post("/v1/chat/completions", json=long)).status_code == 413
            assert (await client.post("/v1/chat/completions", content="{")).status_code == 400
            assert (await client.post("/v1/nothing", json=body)).json()["error"]["type"] == "not_found_error"
        async with serve(policy) as (other, url), httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as client:
            headers = {"Authorization": f"Bearer {session.key}"}  # its session is over
            assert (await client.post("/v1/chat/completions", json=body, headers=headers)).status_code == 401
            assert other.key != session.key

    asyncio.run(talk())
    assert not sampler.histories


@pytest.mark.long
def test_a_client_that_goes_away_ends_its_request() -> None:
    policy, sampler, tokenizer = make("Never.", "One.", "Two.", delay=3600.0)

    async def talk() -> None:
        async with serve(policy) as (session, url), connect(session, url, max_retries=0) as client:
            leaving = asyncio.ensure_future(ask(client, [USER]))
            while not sampler.histories:
                await asyncio.sleep(0.01)
            leaving.cancel()
            while not sampler.cancelled:
                await asyncio.sleep(0.01)
            sampler.delay = 0.0
            await ask(client, [USER])
            await ask(client, [USER, SAID, MORE])
            assert (session.num_abandoned, sampler.cancelled) == (1, 1)

    asyncio.run(asyncio.wait_for(talk(), PATIENCE_SECONDS))
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


@pytest.mark.parametrize("stream", [False, True])
def test_no_room_is_a_context_length_error(stream: bool) -> None:
    policy, _, _ = make("One.", max_length=40)
    error = get_refusal(policy, [{**USER, "content": "x" * 60}], stream=stream)
    assert error.code == "context_length_exceeded" and "maximum context length is 40 tokens" in error.message
    assert policy.has_reached_limit


@pytest.mark.long
def test_sdk_retries_requests_beyond_the_limit() -> None:
    policy, _, _ = make(*["One."] * 6, delay=0.05)

    async def use(client: openai.AsyncOpenAI) -> None:
        await asyncio.gather(*(ask(client, [USER]) for _ in range(6)))

    assert run(policy, use, max_requests=4).status == "finished"


@pytest.mark.parametrize(
    ("path", "body", "shape"),
    [
        ("/v1/chat/completions", {"messages": [USER]}, {"type": "server_error", "param": None, "code": None}),
        ("/v1/messages", {"messages": [USER], "max_tokens": 9}, {"type": "api_error"}),
    ],
)
def test_request_beyond_max_connections_fails_its_session(
    path: str, body: dict[str, Any], shape: dict[str, Any]
) -> None:
    first, sampler, _ = make("One.", delay=3600.0)
    second, unused, _ = make("Two.")
    line = "The endpoint has environment.endpoint.max_connections=1 requests under way. Raise it, or run fewer trajecto"

    async def talk() -> None:
        endpoint = Endpoint(max_connections=1)
        async with (
            endpoint.open(first) as session,
            httpx.AsyncClient(base_url=endpoint.url, timeout=PATIENCE_SECONDS) as client,
        ):

            async def post(key: str) -> httpx.Response:
                headers = {"Authorization": f"Bearer {key}"}
                return await client.post(path, json={"model": "any", **body}, headers=headers)

            waiting = asyncio.ensure_future(post(session.key))
            while not sampler.histories:
                await asyncio.sleep(0.01)
            assert (await post("wrong")).status_code == 401  # which is not counted
            with pytest.raises(EndpointFullError, match=line):
                async with endpoint.open(second) as other:
                    answer = await post(other.key)
                    assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "false")
                    error = answer.json()["error"]
                    assert error.pop("message").startswith(line) and error == shape
            waiting.cancel()
            await asyncio.wait([waiting])
            while sampler.cancelled == 0:
                await asyncio.sleep(0.01)
            sampler.delay, sampler.texts = 0.0, ["One."]
            assert (await post(session.key)).status_code == 200
        await endpoint.close()

    asyncio.run(asyncio.wait_for(talk(), PATIENCE_SECONDS))
    assert not unused.histories


def test_session_beyond_max_sessions_is_refused() -> None:
    async def talk() -> None:
        endpoint = Endpoint(max_sessions=1)
        try:
            for _ in range(2):  # the second one after the first one's end
                async with endpoint.open(make()[0]):
                    with pytest.raises(
                        EndpointFullError, match=r"environment\.endpoint\.max_sessions=1 sessions\. Rai"
                    ):
                        async with endpoint.open(make()[0]):
                            pass
        finally:
            await endpoint.close()

    asyncio.run(talk())


def test_policy_of_a_worker_process_is_refused() -> None:
    async def talk() -> None:
        with pytest.raises(
            TypeError, match=r"^A CannedPolicy is no policy of the trainer's .* Set runs_in_workers = Fal"
        ):
            async with serve(cast("Any", CannedPolicy())):
                pass

    asyncio.run(talk())


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
