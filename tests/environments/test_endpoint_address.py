"""Where agents are told that the endpoint is."""

import asyncio
import ipaddress
import socket
from urllib.parse import urlsplit

import pytest

from rlightning.environments.endpoint import Endpoint
from rlightning.environments.endpoint.address import find_address
from rlightning.rpc import make_url


async def listen(**arguments: str) -> str:
    """Return the host of the endpoint's URL, at which it has been reached."""
    endpoint = Endpoint(**arguments)  # type: ignore[arg-type]
    await endpoint.start()
    try:
        parts = urlsplit(endpoint.url)
        assert parts.hostname is not None
        if "advertised_host" not in arguments:
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.close()
        return parts.hostname
    finally:
        await endpoint.close()


def test_all_addresses_are_advertised_as_a_reachable_one() -> None:
    host = asyncio.run(listen(host="0.0.0.0"))
    assert not ipaddress.ip_address(host).is_unspecified


@pytest.mark.long
def test_an_advertised_host_is_what_agents_get() -> None:
    assert asyncio.run(listen(host="0.0.0.0", advertised_host="trainer.example")) == "trainer.example"
    assert asyncio.run(listen()) == "127.0.0.1"


def test_a_host_without_a_network_advertises_its_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert [find_address(host) for host in ("0.0.0.0", "::", "")] == ["127.0.0.1", "::1", "127.0.0.1"]
    assert [find_address(host) for host in ("10.1.2.3", "localhost", "::1")] == ["10.1.2.3", "localhost", "::1"]
    assert make_url(find_address("::"), 80, "http") == "http://[::1]:80"
