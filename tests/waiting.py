"""Waiting for what other processes, threads and tasks do."""

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import ParamSpec

P = ParamSpec("P")

PATIENCE_SECONDS = 300.0
"""That nothing takes on a machine that is not broken."""


def wait_for(condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    """Return once it holds.

    Raises:
        AssertionError: it does not in so many seconds.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come in time"
        time.sleep(0.02)


def in_event_loop(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Have a test that is a coroutine function run in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), PATIENCE_SECONDS))

    return run


def put_clock_forward(loop: asyncio.AbstractEventLoop, seconds: float) -> None:
    """Let so much time go by on an event loop's clock at once; any thread may call it."""
    time_before = loop.time
    loop.time = lambda: time_before() + seconds  # type: ignore[method-assign]
    loop.call_soon_threadsafe(lambda: None)  # it may be waiting for what is due now


def is_running(pid: int) -> bool:
    """Whether a process goes on; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def still_running(pids: Iterable[int], seconds: float = 60.0) -> list[int]:
    """Those that go on after so many seconds."""
    with contextlib.suppress(AssertionError):
        wait_for(lambda: not any(map(is_running, pids)), seconds)
    return [pid for pid in pids if is_running(pid)]
