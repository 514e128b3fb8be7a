"""Reward functions that behave and that do not, in a module that worker processes can import."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

released = threading.Event()
"""Ends what blocks the event loop."""


def length(completion: str) -> int:
    return len(completion)


def echo(prompt: str, completion: str, **columns: object) -> float:
    """The number that the column ``value`` holds."""
    return float(str(columns["value"]))


def maybe(value: float | None) -> float | None:
    return value


def misbehave(completion: str) -> object:
    """Does what the completion says."""
    if completion == "raise":
        raise ValueError("a reward that raises")
    if completion == "raise at length":
        raise ValueError("begin " + "x" * 30_000_000 + " end \ud800")
    if completion == "sleep":
        time.sleep(3600)
    if completion == "backtrack":
        return float(re.match(r"(a+)+$", "a" * 60 + "b") is not None)
    if completion == "exit":
        os._exit(3)
    if completion == "sys.exit":
        sys.exit(0)
    if completion == "crash":
        signal.raise_signal(signal.SIGSEGV)  # in this thread, as a crash is; kill() may choose another
    if completion == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if completion == "child":
        subprocess.run(["sleep", "3600"], check=True)
    return {"nan": float("nan"), "inf": float("inf"), "text": "1", "none": None, "true": True}.get(completion, 1.0)


def reject_key(completion: str, *, api_key: str, **others: object) -> float:
    raise RuntimeError(f"401 {'y' * 3700} key {api_key} for {others} {'x' * 5000}")


async def reject_key_async(completion: str, *, api_key: str, **others: object) -> float:
    raise RuntimeError(f"401 key {api_key} for {others}")


async def wait_then_length(completion: str) -> float:
    await asyncio.sleep(0.2)
    return len(completion)


async def misbehave_async(completion: str) -> float:
    """Does what the completion says, on the event loop."""
    if completion == "raise":
        raise ValueError("an async reward that raises")
    if completion == "raise at length":
        raise ValueError("begin " + "x" * 30_000_000 + " end \ud800")
    if completion == "sleep":
        await asyncio.sleep(60)
    if completion == "stubborn":
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue
    if completion == "block":
        released.wait()
    return 1.0


def note(completion: str, folder: str) -> float:
    """Leaves a file for each call, named by the completion."""
    (Path(folder) / f"{completion}.{time.monotonic_ns()}").touch()
    return len(completion)


async def note_async(completion: str, folder: str) -> float:
    return note(f"async-{completion}", folder)


def process_id(completion: str) -> int:
    return os.getpid()


def heavy_modules(completion: str) -> int:
    return len({"torch", "vllm", "transformers", "lightning"} & set(sys.modules))


def note_and_sleep(folder: str) -> float:
    """Leaves its process's id in ``folder``, then hangs with a child of its own."""
    with subprocess.Popen(["sleep", "3600"]) as child:
        (Path(folder) / f"{os.getpid()}.pid").touch()
        (Path(folder) / f"{child.pid}.pid").touch()
        time.sleep(3600)
    return 0.0
