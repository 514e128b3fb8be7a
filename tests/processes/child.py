"""A child process of the tests: ``module CONNECTION LIFELINE``."""

import asyncio
import os
import re
import subprocess
import sys

from rlightning.processes.process_group import end_with_parent
from rlightning.rpc import serve_parent
from rlightning.rpc.peer import Method


async def describe() -> list[object]:
    modules = sorted(name for name in ("torch", "numpy", "vllm", "ray") if name in sys.modules)
    return [sys.executable, os.getpid(), os.getpgrp(), modules]


async def start_child() -> int:
    return subprocess.Popen(["sleep", "600"]).pid


async def backtrack() -> None:
    """Hold the interpreter's lock for longer than a test."""
    re.match(r"(a+)+$", "a" * 60 + "b")


async def leave(code: int) -> None:
    sys.stderr.write("its last words\n")
    os._exit(code)


async def serve() -> None:
    connection, lifeline = map(int, sys.argv[-2:])
    end_with_parent(lifeline)
    if "early" in sys.argv:
        await leave(3)
    methods: dict[str, Method] = {
        "describe": describe,
        "start_child": start_child,
        "backtrack": backtrack,
        "leave": leave,
    }
    parent = await serve_parent(connection, methods)
    if "late" not in sys.argv:
        await parent.notify("ready")
    await parent.closed


def main() -> None:
    asyncio.run(serve())


if __name__ == "__main__":
    main()
