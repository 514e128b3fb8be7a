"""The endpoint's chat completions with the clients that agents have: what they sample is recorded as it was sampled."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from agent_cases import run, texts, trained
from chat_templates import ADD
from endpoint_cases import CALL, END, MORE, SAID, SYSTEM, USER, ask, get_refusal, make

from rlightning.environments import AssistantMessage


@pytest.mark.long
def test_openai_sdk_with_tools_is_one_branch() -> None:
    policy, _, tokenizer = make(f"<think>\nhm\n</think>\n\nLet me.\n{CALL}\n{CALL}", " It is 3. ", "Yes.")

    async def use(client: openai.AsyncOpenAI) -> None:
        first = (await ask(client, [SYSTEM, USER], tools=[ADD], tool_choice="auto")).choices[0]
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
        second = (await ask(client, history, tools=[ADD])).choices[0].message
        assert second.content == " It is 3. "
        third = [*history, {"role": "assistant", "content": "It is 3."}, {"role": "user", "content": "Sure?"}]
        await ask(client, third, tools=[ADD])

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
    policy, _, _ = make(f"Let me. {CALL}", "3")

    async def use(client: openai.AsyncOpenAI) -> None:
        async def stream(*messages: Any) -> Any:
            arguments: Any = {"model": "any", "messages": messages, "tools": [ADD]}
            async with client.chat.completions.stream(**arguments) as events:
                return (await events.get_final_completion()).choices[0]

        first = await stream(USER)
        (call,) = first.message.tool_calls
        assert (first.message.content, first.finish_reason, call.function.name) == ("Let me.", "tool_calls", "add")
        said = first.message.model_dump(exclude={"parsed"})
        second = await stream(USER, said, {"role": "tool", "tool_call_id": call.id, "content": "3"})
        assert (second.message.content, second.finish_reason) == ("3", "stop")

    assert len(run(policy, use).branches) == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("second", "tools", "reason"),
    [
        ([SYSTEM, USER, {**SAID, "content": "Two."}, MORE], None, "turn_edited"),
        ([SYSTEM, USER, {**USER, "content": "So far: 1."}, MORE], None, "compacted"),
        ([SYSTEM, USER, SAID, MORE], [ADD], "tools_changed"),
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


@pytest.mark.long
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


def test_reasoning_that_a_client_cut_begins_a_branch() -> None:
    policy, _, _ = make("<think>hm</think>One.", "Two.", family="qwen2.5")
    policy.chat_format.parse = lambda token_ids, *_, **__: _plain(policy, token_ids)  # type: ignore[method-assign]

    async def use(client: openai.AsyncOpenAI) -> None:
        assert (await ask(client, [USER])).choices[0].message.content == "<think>hm</think>One."
        await ask(client, [USER, SAID, MORE])

    assert [branch.reason for branch in run(policy, use).branches] == ["start", "reasoning_dropped"]


def _plain(policy: Any, token_ids: Any) -> Any:
    return AssistantMessage(policy.chat_format.tokenizer.decode(token_ids).removesuffix(END))


@pytest.mark.long
def test_parallel_requests_and_choices_are_own_branches() -> None:
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"top_p": 0.5}, "top_p"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"tools": [ADD], "tool_choice": "required"}, "tool_choice"),
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

    error = get_refusal(policy, **arguments)
    assert error.param == named and named.rpartition(".")[2] in error.message
    assert not sampler.histories and not policy.recorder.turns


def test_ignored_parameters_are_passed_over() -> None:
    policy, sampler, _ = make("One.")

    async def use(client: openai.AsyncOpenAI) -> None:
        await ask(client, [USER], top_p=0.5, temperature=0.0, user="me")

    run(policy, use, ignored=["top_p", "temperature"])
    assert (sampler.samplings[0].top_p, sampler.samplings[0].temperature) == (1.0, 1.0)


def test_calls_that_cannot_be_read_are_text() -> None:
    policy, _, _ = make("Hm. <tool_call>\n{no}\n</tool_call>", CALL)

    async def use(client: openai.AsyncOpenAI) -> None:
        first = (await ask(client, [USER], tools=[ADD])).choices[0]
        assert first.message.content == "Hm. <tool_call>\n{no}\n</tool_call>" and first.message.tool_calls is None
        assert first.finish_reason == "stop"
        second = (await ask(client, [USER, first.message, MORE], tools=[ADD], tool_choice="none")).choices[0]
        assert second.message.content == CALL and second.message.tool_calls is None

    assert [branch.reason for branch in run(policy, use).branches] == ["start"]


@pytest.mark.parametrize(
    "message", [{"role": "assistant", "content": "1", "tool_calls": 5}, {"role": "user", "content": "\ud800"}]
)
def test_session_goes_on_after_a_malformed_message(message: dict[str, Any]) -> None:
    policy, _, _ = make("One.")

    async def use(client: openai.AsyncOpenAI) -> None:
        headers = {"Authorization": f"Bearer {client.api_key}"}
        async with httpx.AsyncClient(base_url=str(client.base_url), headers=headers, timeout=None) as http:
            answer = await http.post("chat/completions", content=json.dumps({"messages": [message, USER]}))
        assert answer.status_code == 400 and "messages" in answer.json()["error"]["message"]
        await ask(client, [USER])

    assert run(policy, use).status == "finished"


def test_tokens_of_beginnings_alone_are_kept() -> None:
    policy, _, _ = make("One.", "Two.")

    async def use(client: openai.AsyncOpenAI) -> None:
        await ask(client, [USER])
        await ask(client, [SYSTEM, USER])

    assert len(run(policy, use).branches) == 2
    assert policy.chat_format.render_json.cache_info().currsize == 1  # type: ignore[attr-defined]
