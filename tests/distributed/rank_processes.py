"""Starting a function on several ranks, each a real process, and reading what each came to."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent


def free_port() -> int:
    """A port that nobody listens on, below those that the system gives to whoever asks for any."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def start_ranks(script: Path, num_ranks: int, *args: str) -> "list[subprocess.Popen[str]]":
    """Run a Python script on ``num_ranks`` processes, with the variables that torch reads its rank from."""
    ports = set[str]()
    while len(ports) < 3:
        ports.add(str(free_port()))
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": ports.pop(),
        "FREE_PORTS": " ".join(ports),  # for those who connect again
        "WORLD_SIZE": str(num_ranks),
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",  # an abort says what each thread was at
        "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    return [
        subprocess.Popen(
            [sys.executable, str(script), *args],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]


def end_ranks(ranks: "list[subprocess.Popen[str]]") -> None:
    """Kill those that are still there."""
    for process in ranks:
        process.kill()
        process.communicate()


def results(ranks: "list[subprocess.Popen[str]]", timeout: float = 500) -> list[dict[str, Any]]:
    """By rank, the JSON object in its last line of output; an empty one for a rank that wrote none.

    Raises:
        AssertionError: a rank did not end in so many seconds; with what all that had not ended were at.
    """
    found = []
    for process in ranks:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{process.args!r} did not end in {timeout} s:\n{_stacks(ranks)}") from None
        lines = output.splitlines()
        found.append(json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {})
    return found


def _stacks(ranks: "list[subprocess.Popen[str]]") -> str:
    stuck = [process for process in ranks if process.poll() is None]
    for process in stuck:
        process.send_signal(signal.SIGABRT)
    return "\n".join(f"process {process.pid}: {process.communicate()[1][-8000:]}" for process in stuck)
