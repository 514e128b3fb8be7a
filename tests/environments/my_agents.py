"""Agents that know nothing of being trained: functions, and what they are run as in tests."""

import asyncio
import functools
from typing import Any

import openai


async def two_turns(client: openai.AsyncOpenAI, prompt: Any) -> float:
    """Ask, and ask again."""
    messages: list[Any] = [{"role": "user", "content": prompt.columns["prompt"]}]
    first = await client.chat.completions.create(model="any", messages=messages)
    messages += [first.choices[0].message, {"role": "user", "content": "+"}]
    last = await client.chat.completions.create(model="any", messages=messages)
    return (last.choices[0].message.content or "").count("1") / 8


@functools.wraps(two_turns)
def wrapped(**given: Any) -> Any:
    """Return another agent's coroutine, as a decorator does that has no ``async def`` of its own."""
    return two_turns(**given)


@functools.wraps(two_turns)
def in_own_loop(**given: Any) -> float:
    """Run another agent in an event loop of its own, in a thread."""
    return asyncio.run(two_turns(**given))


def by_address(base_url: str, api_key: str, model: str, messages: Any, bonus: float = 0.0) -> float:
    """Ask by a client of its own, in a thread."""
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        answer = client.chat.completions.create(model=model, messages=messages)
    return len(answer.choices[0].message.content or "") + bonus


def by_client(client: openai.OpenAI, prompt: Any) -> None:
    """Ask in a thread; reward functions decide."""
    message: Any = {"role": "user", "content": prompt.text}
    assert isinstance(client, openai.OpenAI)
    client.chat.completions.create(model="any", messages=[message])


async def swallows(client: openai.AsyncOpenAI) -> float:
    """Take every error for a wrong answer."""
    try:
        await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])
    except Exception:
        return 0.0
    return 1.0


async def grows(client: openai.AsyncOpenAI) -> float:
    """Go on until there is no more room."""
    messages: list[Any] = []
    while True:
        messages.append({"role": "user", "content": "more"})
        answer = await client.chat.completions.create(model="any", messages=messages)
        messages.append(answer.choices[0].message)


async def crashes_after_its_limit(client: openai.AsyncOpenAI) -> float:
    """Go on without the answer that there was no room for, and break for another reason."""
    try:
        await grows(client)
    except openai.BadRequestError:
        raise ConnectionResetError("the database is gone") from None
    return 1.0


async def idle() -> None:
    """Ask nothing."""


async def no_number(client: openai.AsyncOpenAI) -> Any:
    """Return what is no reward."""
    await swallows(client)
    return "good"
