"""Mutual authentication by a shared key, which is never sent: each side proves that it has the key.

Before both sides have proved that they have the run's key, they exchange messages of a fixed length of some dozen
bytes. Without a key, on a loopback address, the other side must belong to the same user::

    server                                            client
    greeting: magic, with or without a key, nonce ->
                                                  <-  magic, nonce, HMAC(key, "client", both nonces)
    verdict, HMAC(key, "server", both nonces)     ->                                                     then messages

A socket pair inherited by a child process needs no authentication.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rlightning.rpc.connection import ConnectionLostError, RPCError

SCHEME = "tcp"
MAGIC = b"rlightning rpc 1"
WITH_KEY, WITHOUT_KEY = b"k", b"u"
WELCOME, WRONG_KEY, OTHER_USER, BUSY = b"w", b"k", b"u", b"b"
"""The server's verdicts on a client that has sent its proof."""
NONCE_BYTES = DIGEST_BYTES = KEY_BYTES = 32


class AuthenticationError(RPCError):
    """The two sides have different keys, or belong to different users; retrying cannot help."""


class BusyError(ConnectionLostError):
    """The server has its maximum number of connections; retrying later may help."""


def new_key() -> bytes:
    """Return a random key for a server of this run and its clients."""
    return secrets.token_bytes(KEY_BYTES)


def make_url(host: str, port: int, scheme: str = SCHEME) -> str:
    """Return the URL of a server."""
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{port}"


def parse_url(url: str) -> tuple[str, int]:
    """Return host and port of ``tcp://host:port``.

    Raises:
        ValueError: the URL has another form.
    """
    with contextlib.suppress(ValueError):  # the port is not a number
        parts = urlsplit(url)
        if parts.scheme == SCHEME and parts.hostname and parts.port and not parts.path.strip("/"):
            return parts.hostname, parts.port
    raise ValueError(f"'{url}' is no address. Write {SCHEME}://host:8100.")


async def authenticate_server(end: socket.socket, key: bytes | None) -> None:
    """As a client, prove to the server that this side has the key, and verify the server's proof.

    Args:
        end: connected, non-blocking socket.
        key: the shared key; None for a server without a key, of this user on this host.

    Raises:
        AuthenticationError: the server has another key, or none, or belongs to another user.
        BusyError: the server has its maximum number of clients.
        OSError: the server has closed the connection.
    """
    greeting = await _receive(end, len(MAGIC) + 1 + NONCE_BYTES)
    magic, mode, their_nonce = greeting[: len(MAGIC)], greeting[len(MAGIC) : len(MAGIC) + 1], greeting[-NONCE_BYTES:]
    if magic != MAGIC or mode not in (WITH_KEY, WITHOUT_KEY):
        raise AuthenticationError("it is not a server of this version of rlightning")
    if key is None and mode == WITH_KEY:
        raise AuthenticationError("it asks for a key, and this process has none")
    if key is not None and mode == WITHOUT_KEY:
        raise AuthenticationError("it has no key, but this process has one")
    if key is None and not is_of_this_user(end):
        raise AuthenticationError("it belongs to another user, or is not on this host: both sides need a key")
    nonce = secrets.token_bytes(NONCE_BYTES)
    await _send(end, MAGIC + nonce + _digest(key, b"client", their_nonce, nonce))
    reply = await _receive(end, 1 + DIGEST_BYTES)
    verdict, proof = reply[:1], reply[1:]
    if verdict == OTHER_USER:
        raise AuthenticationError("it belongs to another user, and has no key: both sides need one")
    expected = _digest(key, b"server" + verdict, their_nonce, nonce)
    if verdict not in (WELCOME, BUSY) or not hmac.compare_digest(proof, expected):
        raise AuthenticationError("it has another key")
    if verdict == BUSY:
        raise BusyError("it has its maximum number of clients")


async def authenticate_client(end: socket.socket, key: bytes | None, admit: Callable[[], bool]) -> None:
    """As a server, verify the client's proof that it has the key, and send the server's proof.

    Args:
        end: connected, non-blocking socket.
        key: the shared key; None admits clients of this user on this host.
        admit: called when the client has proved that it has the key; returns whether to accept the client.

    Raises:
        AuthenticationError: the client has another key, or none, or belongs to another user.
        BusyError: ``admit`` returned False.
        OSError: the client has closed the connection.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    await _send(end, MAGIC + (WITHOUT_KEY if key is None else WITH_KEY) + nonce)
    answer = await _receive(end, len(MAGIC) + NONCE_BYTES + DIGEST_BYTES)
    magic, their_nonce, digest = answer[: len(MAGIC)], answer[len(MAGIC) : -DIGEST_BYTES], answer[-DIGEST_BYTES:]
    if magic != MAGIC or not hmac.compare_digest(digest, _digest(key, b"client", nonce, their_nonce)):
        verdict = WRONG_KEY
    elif key is None and not is_of_this_user(end):
        verdict = OTHER_USER
    else:
        verdict = WELCOME if admit() else BUSY
    is_known = verdict in (WELCOME, BUSY)
    proof = _digest(key, b"server" + verdict, nonce, their_nonce) if is_known else bytes(DIGEST_BYTES)
    await _send(end, verdict + proof)
    if verdict == BUSY:
        raise BusyError("no place for another client")
    if verdict == WRONG_KEY:
        raise AuthenticationError("it has another key")
    if verdict == OTHER_USER:
        raise AuthenticationError("without a key, only processes of the same user on this host are served")


def is_of_this_user(end: socket.socket) -> bool:
    """Return whether the remote end of a TCP connection belongs to this user on this host."""
    if not ipaddress.ip_address(end.getpeername()[0]).is_loopback:
        return False
    wanted = [_proc_name(end.family, end.getpeername()), _proc_name(end.family, end.getsockname())]
    table = Path("/proc/net/tcp6" if end.family == socket.AF_INET6 else "/proc/net/tcp")
    with contextlib.suppress(FileNotFoundError):
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1:3] == wanted:
                return int(fields[7]) == os.geteuid()
    return False


def _proc_name(family: int, address: Sequence[object]) -> str:
    """Return an address in the notation of /proc/net/tcp: hexadecimal words in the machine's byte order."""
    packed = socket.inet_pton(family, str(address[0]))
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return f"{''.join(f'{word:08X}' for word in words)}:{address[1]:04X}"


def _digest(key: bytes | None, role: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.digest(key or b"", b"%b %b %b" % (role, server_nonce, client_nonce), "sha256")


async def _send(end: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(end, data)


async def _receive(end: socket.socket, num_bytes: int) -> bytes:
    """Read and return exactly this number of bytes."""
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < num_bytes:
        piece = await loop.sock_recv(end, num_bytes - len(data))
        if not piece:
            raise ConnectionLostError("it closed the connection")
        data += piece
    return data
