"""Between a trainer and an engine on another host: addresses, and who may talk to whom.

What goes over the wire is pickled, and whoever may send a pickle may run code. So nothing is unpickled before both ends
have shown that they know the token (multiprocessing's HMAC challenge, which sends nobody the token), or, on a loopback
address without one, that the other end belongs to the same user::

    engine                      trainer
    greeting            ->                          whether it asks for a token
    challenge           <->     challenge           only with a token
                        <-      answer              only without one: who says nothing is no trainer
    welcome, or not     ->                          what follows is pickled
"""

import contextlib
import ipaddress
import socket
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from urllib.parse import urlsplit

from rlightning import intervals
from rlightning.engine_token import TOKEN
from rlightning.errors import ConfigError, EngineError
from rlightning.rollout.engine_link import borrowed_socket, limit_waiting
from rlightning.rpc.authentication import is_of_this_user
from rlightning.rpc.connection import KEEPALIVE

SCHEME = "tcp"
MIN_SECONDS = 0.1
MAX_BYTES = 256
"""Of a message before the other end is known."""

WITH_TOKEN, WITHOUT_TOKEN = b"rlightning engine with a token", b"rlightning engine without a token, which listens"
TRAINER = b"rlightning trainer"
WELCOME, BUSY, STRANGER = b"welcome", b"busy", b"stranger"


class NotNowError(OSError):
    """The engine is there, and may be free later."""


def parse_url(url: str) -> tuple[str, int]:
    """Host and port of ``tcp://host:port``."""
    with contextlib.suppress(ValueError):  # of a port that is no number
        parts = urlsplit(url)
        if parts.scheme == SCHEME and parts.hostname and parts.port and not parts.path.strip("/"):
            return parts.hostname, parts.port
    raise ConfigError(f"rollout.engines: '{url}' is no address of an engine. Write {SCHEME}://host:8100.")


def own_address(urls: Sequence[str]) -> str:
    """The address of this machine at which the engines of ``urls`` reach it; one for all of them."""
    found = "127.0.0.1"
    for url in urls:
        with contextlib.suppress(OSError):
            family, kind, _, _, address = socket.getaddrinfo(*parse_url(url), type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as end:
                end.connect(address)  # which sends nothing
                found = str(end.getsockname()[0])
            if not ipaddress.ip_address(found).is_loopback:
                break
    return found


def reach(host: str, port: int, seconds: float) -> Connection:
    """Connect to an engine; :func:`enter` comes next. That, and each of its steps, may take so many ``seconds``.

    Raises:
        OSError: nobody is there.
    """
    seconds = max(seconds, MIN_SECONDS)
    return make_connection(socket.create_connection((host, port), timeout=seconds), seconds)


def make_connection(end: socket.socket, seconds: float = intervals.CONNECT_TIMEOUT) -> Connection:
    """Of a socket, which is used up; reads and writes fail after some ``seconds``."""
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection = Connection(end.detach())
    limit_waiting(connection, seconds)
    return connection


def enter(connection: Connection, url: str, token: bytes | None) -> None:
    """The trainer's part; what comes over ``connection`` may be unpickled when this returns.

    Raises:
        EngineError: it is the wrong engine or the wrong token.
        OSError, EOFError: the engine does not answer, or is busy.
    """
    greeting = connection.recv_bytes(MAX_BYTES)
    if greeting not in (WITH_TOKEN, WITHOUT_TOKEN):
        raise EngineError(f"{url} is no engine of `rlightning serve` that this version of rlightning understands.")
    if token is None and greeting == WITH_TOKEN:
        raise EngineError(f"{url} asks for a token. Set {TOKEN} to the one that it was started with.")
    if token is not None:
        if greeting == WITHOUT_TOKEN:
            raise EngineError(f"{url} has no token, but here {TOKEN} is set. Start `rlightning serve` with it, too.")
        try:
            answer_challenge(connection, token)
            deliver_challenge(connection, token)
        except AuthenticationError:
            raise EngineError(f"{url} was started with another token than {TOKEN} has here.") from None
    elif not _is_of_this_user(connection):
        raise EngineError(f"{url} belongs to another user, or is not on this host. Both sides need {TOKEN}.")
    else:
        connection.send_bytes(TRAINER)
    reply = connection.recv_bytes(MAX_BYTES)
    if reply == STRANGER:
        raise EngineError(f"{url} belongs to another user, and has no token. Both sides need {TOKEN}.")
    if reply != WELCOME:
        raise NotNowError("it serves another trainer")


def let_in(connection: Connection, token: bytes | None) -> None:
    """The engine's part; what comes over ``connection`` may be unpickled when this returns.

    Raises:
        AuthenticationError: it is the wrong token, or a stranger.
        OSError, EOFError: the trainer does not answer.
    """
    connection.send_bytes(WITHOUT_TOKEN if token is None else WITH_TOKEN)
    if token is not None:
        deliver_challenge(connection, token)
        answer_challenge(connection, token)
        return
    if connection.recv_bytes(MAX_BYTES) != TRAINER:
        raise AuthenticationError("it is no trainer")
    if not _is_of_this_user(connection):
        connection.send_bytes(STRANGER)
        raise AuthenticationError("without a token, only processes of the same user on this host are served")


def _is_of_this_user(connection: Connection) -> bool:
    with borrowed_socket(connection) as end:
        return is_of_this_user(end)
