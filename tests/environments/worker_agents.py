"""Agents that tests run in worker processes."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import openai

from rlightning.types import AgentTrace, Outcome, Prompt


async def ask(client: openai.AsyncOpenAI, text: str = "hi", **arguments: Any) -> str:
    """Ask once, and return the answer."""
    messages: Any = [{"role": "user", "content": text}]
    answer = await client.chat.completions.create(model="any", messages=messages, **arguments)
    return answer.choices[0].message.content or ""


async def do(client: openai.AsyncOpenAI, base_url: str, api_key: str, prompt: Prompt, folder: str) -> Any:
    """Do what the prompt says, after a turn."""
    deed, said = prompt.columns["prompt"], await ask(client)
    metrics = {"pid": float(os.getpid())}
    if deed == "traces":
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as other:
            said += await ask(other, "other")
        traces = [AgentTrace("a", 1.0, [0]), AgentTrace("b", 0.5, [1])]
        return Outcome(traces=traces, metrics={**metrics, "length": len(said)})
    if deed == "format":
        await ask(client, response_format={"type": "json_object"})
    if deed == "raise":
        raise KeyError("no such thing")
    if deed == "grow":
        async with httpx.AsyncClient(timeout=None) as http:
            messages = [{"role": "user", "content": "more" * 400}]
            answer = await http.post(
                f"{base_url}/chat/completions",
                json={"messages": messages},
                headers={"Authorization": f"Bearer {api_key}"},
            )
            answer.raise_for_status()
    if deed == "exit":
        raise SystemExit(3)
    if deed == "crash":
        mark = Path(folder) / "crashed"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    if deed == "wait":
        (Path(folder) / "waits").touch()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            (Path(folder) / "cancelled").write_text(said)
            raise
    return Outcome(reward=0.5, metrics=metrics)


def in_a_thread(client: openai.OpenAI, messages: Any) -> float:
    """Ask without an event loop."""
    client.chat.completions.create(model="any", messages=messages)
    return 1.0
