"""The rendezvous of a weight transfer: its store, and who may join."""

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlightning.rollout.weights.rendezvous import RendezvousServer, join_rendezvous
from rlightning.rollout.weights.transfer_group import TransferGroup
from rlightning.rollout.weights.transports import own_address
from rlightning.rpc.server import MAX_UNAUTHENTICATED

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


@pytest.mark.long
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


@pytest.mark.long
def test_rendezvous_refuses_processes_without_the_key(
    server: RendezvousServer, caplog: pytest.LogCaptureFixture
) -> None:
    place = server.places[1]
    with pytest.raises(OSError, match=rf"{HOST}, port {place.port}, is the rendezvous of another group"):
        join_rendezvous(replace(place, key=bytes(32)))
    with pytest.raises(RuntimeError):
        _c10d.TCPStore(HOST, place.port, is_master=False, timeout=timedelta(seconds=2))
    with socket.create_connection((HOST, place.port)) as connection:
        connection.sendall(b"\xff" * 1000)
    assert join_rendezvous(place).check([])
    assert "was closed: it has another key" in caplog.text
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
    unauthenticated = flood(place.port, 2 * MAX_UNAUTHENTICATED)
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
    for connection in unauthenticated:
        connection.close()


def test_the_address_that_engines_reach_the_trainer_at() -> None:
    assert own_address([]) == "127.0.0.1"
    assert own_address(["tcp://127.0.0.1:8100"]) == "127.0.0.1"
    assert own_address(["tcp://no-such-host.invalid:8100", "tcp://127.0.0.1:8100"]) == "127.0.0.1"
