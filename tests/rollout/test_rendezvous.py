"""Connections from strangers: to the rendezvous of a weight transfer, and in numbers that use up file descriptors."""

import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlightning import intervals
from rlightning.rollout.acceptor import MAX_UNKNOWN, Acceptor
from rlightning.rollout.engine_wire import enter, let_in, reach
from rlightning.rollout.weights.rendezvous import RendezvousServer, join_rendezvous
from rlightning.rollout.weights.transfer_group import TransferGroup

HOST = "127.0.0.1"
_c10d: Any = dist


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    server = RendezvousServer(HOST, 3, timeout=60.0)
    yield server
    server.close()


def flood(port: int, count: int) -> list[socket.socket]:
    """Connections that say nothing."""
    return [socket.create_connection((HOST, port)) for _ in range(count)]


def test_store_shares_keys_between_members(server: RendezvousServer) -> None:
    first, second = (join_rendezvous(place) for place in server.places[1:])
    assert not first.check(["a"]) and not server.store.check(["a", "b"])
    first.set("a", "one")
    second.set("b", b"\x00two")
    assert server.store.check(["a", "b"])
    assert second.get("a") == b"one" and server.store.get("b") == b"\x00two"
    assert [first.add("count", 2), second.add("count", 3)] == [2, 5] and first.get("count") == b"5"
    assert first.delete_key("a") and not second.delete_key("a") and not second.check(["a"])
    with pytest.raises(TimeoutError, match=r"longer than 0\.1 s"):
        first.wait(["c", "d"], timedelta(seconds=0.1))
    waiting = threading.Timer(0.2, partial(second.set, "late", "here"))
    waiting.start()
    assert first.get("late") == b"here"


def test_rendezvous_refuses_processes_without_the_key(
    server: RendezvousServer, caplog: pytest.LogCaptureFixture
) -> None:
    place = server.places[1]
    with pytest.raises(OSError, match=rf"{HOST}, port {place.port}, is the rendezvous of another group"):
        join_rendezvous(replace(place, key=bytes(32)))
    with pytest.raises(RuntimeError):
        _c10d.TCPStore(HOST, place.port, is_master=False, timeout=timedelta(seconds=2))
    with socket.create_connection((HOST, place.port)) as stranger:
        stranger.sendall(b"\xff" * 1000)
    assert join_rendezvous(place).check([])
    assert "was not let in" in caplog.text
    assert not server.store.check(["joined/1"])


def test_members_learn_that_the_server_is_closed(server: RendezvousServer) -> None:
    store = join_rendezvous(server.places[1])
    server.close()
    with pytest.raises(RuntimeError, match="the rendezvous is over"):
        store.check(["a"])
    with pytest.raises(OSError):
        join_rendezvous(replace(server.places[1], timeout=1.0))


def test_weights_reach_receivers_amid_strangers() -> None:
    server = RendezvousServer(HOST, 2, timeout=60.0)
    own, place = server.places
    assert repr(place.key) not in repr(place)
    sender = TransferGroup(own, torch.device("cpu"), server)
    strangers = flood(place.port, 2 * MAX_UNKNOWN)
    received = torch.zeros(5)

    def receive() -> None:
        receiver = TransferGroup(place, torch.device("cpu"))
        receiver.connect()
        receiver.broadcast(received)
        receiver.leave("done")

    thread = threading.Thread(target=receive)
    thread.start()
    sender.connect()
    sender.broadcast(torch.arange(5.0))
    thread.join()
    sender.leave("done")
    assert received.tolist() == [0, 1, 2, 3, 4]
    for stranger in strangers:
        stranger.close()


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
