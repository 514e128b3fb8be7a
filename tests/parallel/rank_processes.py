"""Functions and scripts of tests in processes of their own: on several ranks, or in one as a controller is."""

import base64
import contextlib
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlightning.parallel.launcher import find_port

TESTS = str(Path(__file__).parent.parent)
_numbers = itertools.count()


# Scripts


def start_ranks(script: Path, num_ranks: int, *args: str) -> "list[subprocess.Popen[str]]":
    """Run a Python script on ``num_ranks`` processes, with the variables that torch reads its rank from."""
    return [_start([str(script), *args], variables) for variables in _rank_variables(num_ranks)]


def _rank_variables(num_ranks: int) -> list[dict[str, str]]:
    ports = set[str]()
    while len(ports) < 3:
        ports.add(str(find_port()))
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": ports.pop(),
        "FREE_PORTS": " ".join(ports),  # for those who connect again
        "WORLD_SIZE": str(num_ranks),
        "PYTHONFAULTHANDLER": "1",  # an abort says what each thread was at
    }
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def _start(arguments: list[str], variables: dict[str, str]) -> "subprocess.Popen[str]":
    paths = [path for path in sys.path if path.startswith(TESTS)]  # where the tests' own modules are
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    return subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


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
        output, _ = _wait(process, timeout, ranks)
        lines = output.splitlines()
        found.append(json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {})
    return found


def run_script(script: Path, num_ranks: int, *args: str) -> list[dict[str, Any]]:
    """:func:`results` of a script, of which nothing is left."""
    ranks = start_ranks(script, num_ranks, *args)
    try:
        return results(ranks)
    finally:
        end_ranks(ranks)


def _wait(process: "subprocess.Popen[str]", timeout: float, ranks: "list[subprocess.Popen[str]]") -> tuple[str, str]:
    """Return a process's output; at the timeout, raise an error with the stacks of all ranks that have not ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.communicate(timeout=timeout)
    stuck = [rank for rank in ranks if rank.poll() is None]
    for rank in stuck:
        rank.send_signal(signal.SIGABRT)
    stacks = "\n".join(f"process {rank.pid}: {rank.communicate()[1][-8000:]}" for rank in stuck)
    raise AssertionError(f"{process.args!r} did not end in {timeout} s:\n{stacks}")


# Functions


@dataclass(frozen=True)
class Call:
    """A function of a test file at work in a process of its own, and the file that gets what it returns, as JSON."""

    process: "subprocess.Popen[str]"
    returned: Path
    is_rank: bool


def start_calls(work: Callable[..., Any], num_ranks: int, folder: Path, *args: Any) -> list[Call]:
    """Call ``work(folder, *args)`` on ranks, with the variables that torch reads its rank from."""
    return [_call(work, folder, args, variables) for variables in _rank_variables(num_ranks)]


def start_controller(work: Callable[..., Any], folder: Path, *args: Any) -> Call:
    """Call ``work(folder, *args)`` in one process without a rank, as one that makes a RayController is."""
    return _call(work, folder, args, {})


def _call(work: Callable[..., Any], folder: Path, args: Sequence[Any], variables: dict[str, str]) -> Call:
    returned = folder / f"returned{next(_numbers)}.json"
    call = base64.b64encode(pickle.dumps((work, (folder, *args)))).decode()
    process = _start([__file__, call, str(returned)], variables)
    return Call(process, returned, is_rank="RANK" in variables)


def finish(calls: Sequence[Call], timeout: float = 500) -> list[Any]:
    """Return each call's result; if a process fails, raise an error with its output and that of others that have
    failed by then, and end the rest.
    """
    ranks = [call.process for call in calls if call.is_rank]
    try:
        for call in calls:
            _, error = _wait(call.process, timeout, ranks)
            if call.process.returncode:
                others = [other.process for other in calls if other is not call and other.process.poll()]
                raise AssertionError("\n".join([error, *(other.communicate()[1] for other in others)]))
    finally:
        for call in calls:
            if call.process.poll() is None:
                call.process.terminate()  # a controller ends its cluster
                try:
                    call.process.wait(10)
                except subprocess.TimeoutExpired:
                    call.process.kill()
    return [json.loads(call.returned.read_text()) for call in calls]


def each_run(runs: dict[str, dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and arguments of runs; Lightning takes a rank's variables away after each fit, and here they come back."""
    ranks = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ}
    for name, arguments in runs.items():
        os.environ.update(ranks)
        yield name, dict(arguments)


def main() -> None:
    """Run a call as :func:`_call` has written it; what it returns goes to the file that is named behind it."""
    call, returned = sys.argv[1:]
    torch.set_num_threads(1)
    function, arguments = pickle.loads(base64.b64decode(call))
    Path(returned).write_text(json.dumps(function(*arguments), default=str))


if __name__ == "__main__":
    main()
