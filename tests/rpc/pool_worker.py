"""A worker process of the tests, with an event loop: ``pool_worker.py PROGRESS STACKS CONNECTION LIFELINE``."""

import asyncio
import faulthandler
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rlightning.rpc.peer import Method
from rlightning.rpc.progress import CALL, track_tasks
from rlightning.rpc.run_key import RUN_KEY_VARIABLE
from rlightning.rpc.worker import STACK_SIGNAL, Worker


def backtrack() -> None:
    """Hold the interpreter's lock for longer than a test."""
    re.match(r"(a+)+$", "a" * 60 + "b")


def write_late(*_: object) -> None:
    """Write something as stacks, as a process that gets no CPU for a while."""
    time.sleep(1.5)
    os.write(int(sys.argv[-3]), b"a late frame")


async def do(deed: str, folder: str) -> int:
    """Do what the deed says, and note that it has begun; the process's id."""
    await asyncio.sleep(0.01)
    (Path(folder) / f"{deed}.{time.monotonic_ns()}").touch()
    if deed == "slow":
        await asyncio.sleep(0.5)
    elif deed == "block":
        time.sleep(3600)
    elif deed == "backtrack":
        backtrack()
    elif deed == "backtrack in a thread":
        threading.Timer(0.1, backtrack).start()
        await asyncio.sleep(3600)
    elif deed == "write stacks late":
        faulthandler.unregister(STACK_SIGNAL)
        signal.signal(STACK_SIGNAL, write_late)
        time.sleep(3600)
    elif deed == "die for stacks":
        faulthandler.unregister(STACK_SIGNAL)
        signal.signal(STACK_SIGNAL, signal.SIG_DFL)
        time.sleep(3600)
    elif deed == "exit":
        os._exit(3)
    elif deed == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif deed == "raise":
        raise ValueError(deed)
    elif deed == "hold":
        try:
            await asyncio.sleep(3600)
        finally:
            (Path(folder) / "cleaned up").touch()
    elif deed == "has key":
        return int(RUN_KEY_VARIABLE in os.environ)
    return os.getpid()


async def main() -> None:
    worker = Worker()
    track_tasks(asyncio.get_running_loop(), worker.progress.show)

    async def set_up(deed: str) -> None:
        if deed == "exit":
            os._exit(5)
        if deed == "raise":
            raise ValueError(deed)
        if deed.startswith("/"):  # the second process of these fails
            Path(deed, f"start.{os.getpid()}").touch()
            if len(list(Path(deed).glob("start.*"))) == 2:
                raise ValueError("second")
        if deed == "hold":
            await asyncio.sleep(3600)

    async def call(key: int, deed: str, folder: str) -> int:
        CALL.set(key)
        return await asyncio.create_task(do(deed, folder))

    async def beat() -> None:
        while True:
            worker.progress.show(0, False)
            await asyncio.sleep(0.05)

    beating: asyncio.Task[Any] = asyncio.create_task(beat())
    methods: dict[str, Method] = {"setup": set_up, "call": call}
    await (await worker.connect(methods)).wait_closed()
    beating.cancel()


if __name__ == "__main__":
    asyncio.run(main())
