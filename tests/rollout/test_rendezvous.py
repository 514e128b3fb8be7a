"""Connections from strangers, in numbers that use up file descriptors."""

import resource
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from multiprocessing.connection import Connection

import pytest
from rlightning.rollout.acceptor import MAX_UNKNOWN, Acceptor
from rlightning.rollout.engine_wire import enter, let_in, reach

from rlightning import intervals

HOST = "127.0.0.1"


def flood(port: int, count: int) -> list[socket.socket]:
    """Connections that say nothing."""
    return [socket.create_connection((HOST, port)) for _ in range(count)]


def test_acceptor_sheds_the_oldest_idle_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "CONNECT_TIMEOUT", 3600.0)  # time alone closes nothing
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    served: list[str] = []

    def serve(connection: Connection, peer: str) -> None:
        served.append(peer)
        connection.send_bytes(b"welcome")
        connection.poll(60.0)

    acceptor = Acceptor(listener, partial(let_in, token=b"secret"), serve)
    guest = reach(HOST, port, 60.0)
    enter(guest, "tcp://here", b"secret")
    strangers = flood(port, MAX_UNKNOWN + 10)
    for stranger in strangers[:10]:  # they get the greeting and then the end
        stranger.settimeout(60.0)
        while stranger.recv(1000):
            pass
    strangers[-1].settimeout(0.5)
    with pytest.raises(TimeoutError):
        while strangers[-1].recv(1000):
            pass
    assert len(served) == 1 and not guest.poll(0), "one that has authenticated stays"
    acceptor.close()
    with pytest.raises(OSError):
        socket.create_connection((HOST, port), 5.0)
    for stranger in strangers:
        stranger.close()
    guest.close()


def test_acceptor_goes_on_after_a_thread_could_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    served: list[str] = []

    def serve(connection: Connection, peer: str) -> None:
        served.append(peer)
        connection.send_bytes(b"welcome")

    acceptor = Acceptor(listener, partial(let_in, token=b"secret"), serve)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "connection":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as few:
        few.setattr(threading.Thread, "start", refuse)
        with socket.create_connection((HOST, port), 60.0) as refused:
            assert refused.recv(1000) == b""
    guest = reach(HOST, port, 60.0)
    enter(guest, "tcp://here", b"secret")
    assert len(served) == 1
    guest.close()
    acceptor.close()


FEW_DESCRIPTORS = """
import resource, socket, sys, threading
from dataclasses import replace
from functools import partial
from rlightning.rollout.acceptor import Acceptor
from rlightning.rollout.engine_wire import let_in
listener = socket.create_server(("127.0.0.1", 0))
held = [open("/dev/null") for _ in range(10)]
used = max(file.fileno() for file in held)
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 6, used + 6))  # for five connections
Acceptor(listener, partial(let_in, token=b"secret"), lambda connection, peer: connection.send_bytes(b"welcome"))
print(listener.getsockname()[1], flush=True)
threading.Event().wait()
"""


@pytest.mark.processes
def test_acceptor_goes_on_where_file_descriptors_run_out() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FEW_DESCRIPTORS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        port = int(process.stdout.readline())
        strangers = flood(port, 40)
        end = time.monotonic() + 60.0
        while True:  # as a trainer does
            guest = reach(HOST, port, 60.0)
            try:
                enter(guest, "tcp://here", b"secret")
                break
            except (EOFError, OSError):
                assert time.monotonic() < end
                time.sleep(0.1)
            finally:
                guest.close()
        process.kill()
        errors = process.stderr.read()
    assert errors.count("Too many open files") >= 1 and "Traceback" not in errors
    for stranger in strangers:
        stranger.close()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 100, "of this process"
