"""Async reward functions with clients at module level, as judges behind a network have them."""

import asyncio
import functools
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from rlightning.rewards import answer_checker


class Client:
    """Keeps connections as HTTP clients do: each is bound to the event loop that opened it."""

    def __init__(self) -> None:
        self.limit = asyncio.Semaphore(2)
        self.connections: asyncio.Queue[asyncio.Event] = asyncio.Queue()
        self.loops: set[asyncio.AbstractEventLoop] = set()

    async def ask(self) -> float:
        """Wait for one of two places, and answer on a connection."""
        async with self.limit:
            loop = asyncio.get_running_loop()
            self.loops.add(loop)
            connection = self.connections.get_nowait() if self.connections.qsize() else asyncio.Event()
            loop.call_later(0.001, connection.set)
            await connection.wait()
            self.connections.put_nowait(connection)
        return 1.0


client = Client()


async def judge(completion: str) -> float:
    return await client.ask()


async def count_loops(completion: str) -> float:
    """How many loops the client has served, this one included."""
    await client.ask()
    return len(client.loops)


async def process_id(completion: str) -> float:
    return os.getpid()


def backtrack() -> None:
    """Hold the interpreter's lock for longer than a test."""
    re.match(r"(a+)+$", "a" * 60 + "b")


async def run_between_steps(function: Callable[[], None]) -> None:
    """Run a function in a thread while the loop executes no call's step, so that no call seems to be the cause."""

    def run() -> None:
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()

    asyncio.get_running_loop().call_later(0.2, run)
    await asyncio.sleep(3600)


async def misbehave(completion: str, folder: str) -> float:
    """Does what the completion says, so that no other call of the process gets on; notes each call in the folder."""
    (Path(folder) / f"{completion}.{time.monotonic_ns()}").touch()
    await client.ask()
    if completion == "slow" and len(list(Path(folder).glob("slow.*"))) < 2:
        await asyncio.sleep(3600)  # under way when the process ends: only its repetition returns
    if completion == "block":
        time.sleep(3600)
    if completion == "backtrack in a thread":
        await run_between_steps(backtrack)
    if completion == "exit":
        os._exit(3)
    if completion == "exit in a thread":
        await run_between_steps(functools.partial(os._exit, 4))
    if completion == "crash":
        os.abort()
    return 1.0


def unsendable(function: Callable[..., Any]) -> Callable[..., Any]:
    """A closure, which no other process can load."""

    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        return await function(*args, **kwargs)

    return call


def retry(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that is no async def itself, and gives the coroutine on."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that runs the coroutine to its end, on a loop of its own."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return asyncio.run(function(*args, **kwargs))

    return call


@retry
async def retried(completion: str) -> float:
    if completion == "raise":
        raise ValueError("no answer")
    if completion == "sleep":
        await asyncio.sleep(3600)
    return await client.ask()


async def wait_briefly(completion: str) -> float:
    await asyncio.sleep(0)
    return 1.0


@run
async def run_to_its_end(completion: str) -> float:
    return await wait_briefly(completion)


def forget_to_await(completion: str) -> Any:
    """No async def, and no decorator says that it calls one."""
    return judge(completion)


@answer_checker
async def judge_answer(completion: str, answer: str) -> float:
    return await client.ask()


async def end_oddly(completion: str) -> float:
    """Raises what event loops treat as no exception of a task."""
    if completion == "exit":
        raise SystemExit(3)
    if completion == "cancel":
        raise asyncio.CancelledError
    return 1.0


async def hold_on(folder: str) -> float:
    """Waits for ever; when it is cancelled it takes a moment to clean up."""
    (Path(folder) / "begun").touch()
    try:
        await asyncio.sleep(3600)
    finally:
        await asyncio.sleep(0.05)
        (Path(folder) / "cleaned up").touch()
    return 1.0


async def hold_unless(completion: str, folder: str) -> float:
    """Waits for ever, unless the completion says "go"."""
    return 1.0 if completion == "go" else await hold_on(folder)


kept: list[object] = []


async def leave_behind(folder: str) -> float:
    """Leaves a task and an asynchronous generator, which write a file each as they end."""

    async def watch() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            (Path(folder) / "task ended").touch()

    async def stream() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await asyncio.sleep(0)
            (Path(folder) / "generator ended").touch()

    values = stream()
    kept.extend([asyncio.create_task(watch()), values])
    return float(await anext(values))


class Locked:
    """Has a lock, which cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def score(self, completion: str) -> float:
        with self.lock:
            return 1.0

    async def score_async(self, completion: str) -> float:
        with self.lock:
            return 2.0


locked = Locked()
