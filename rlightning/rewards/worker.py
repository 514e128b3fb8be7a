"""The process that reward functions run in.

It reads lists of calls from its connection and answers call by call: the parent knows at any time which one runs.
A watchdog in C ends the process, with the function's stack in the log, when a call takes too long. This works also
while the function holds the interpreter's lock, as a regular expression that backtracks does.
"""

import contextlib
import faulthandler
import os
import pickle
import queue
import signal
import threading
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from rlightning.foreign_text import hide
from rlightning.rewards.calls import Call, Outcome, failure, to_number
from rlightning.rewards.sources import install


class WorkerFunction(NamedTuple):
    """A pickled reward function and its timeout in seconds."""

    pickled: bytes
    timeout: float


class Loaded(NamedTuple):
    """A function, or the outcome that each of its calls has where it cannot be imported; its timeout in seconds."""

    function: Any
    timeout: float


def load_functions(connection: "Connection[Any, Any]", log_fd: int) -> list[Loaded]:
    """Make this process one that runs reward functions, and load those that the parent sends first.

    Args:
        connection: to the parent.
        log_fd: of a file that gets the stacks of all threads if the process crashes.
    """
    os.dup2(2, 1)  # what functions print must not get into the trainer's standard output
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable(log_fd)
    functions: list[WorkerFunction]
    functions, modules, secrets = connection.recv()
    hide(secrets)
    install(modules)
    return [Loaded(_load(function), function.timeout) for function in functions]


def serve(connection_fd: int, log_fd: int) -> None:
    """Run calls until the parent closes the connection, or dies."""
    connection: Connection[Any, Any] = Connection(connection_fd)
    functions = load_functions(connection, log_fd)
    chunks: queue.SimpleQueue[list[Call]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, chunks), daemon=True).start()
    connection.send("ready")
    while True:
        for call in chunks.get():
            faulthandler.dump_traceback_later(functions[call.function].timeout, exit=True, file=log_fd)
            outcome = run_call(functions[call.function].function, call)
            faulthandler.cancel_dump_traceback_later()
            connection.send(outcome)


def run_call(function: Any, call: Call) -> Outcome:
    """Call the function; whatever it raises, SystemExit included, becomes an outcome."""
    if isinstance(function, Outcome):
        return function
    try:
        return Outcome(to_number(function(**call.arguments)))
    except BaseException as error:
        return failure(error)


def _load(function: WorkerFunction) -> Any:
    """The function, or the outcome that each of its calls has where it cannot be imported here."""
    try:
        return pickle.loads(function.pickled)
    except BaseException as error:
        return failure(error)


def _receive(connection: "Connection[Any, Any]", chunks: "queue.SimpleQueue[list[Call]]") -> None:
    """Read on while a function runs: the end of the parent ends this process and what its functions started."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            chunks.put(connection.recv())
    os.killpg(0, signal.SIGKILL)
