"""The secret that an engine and trainers on other hosts share, and who needs one. Light: it imports no torch."""

import ipaddress
import os
import socket

from rlightning.errors import ConfigError

TOKEN = "RLIGHTNING_ENGINE_TOKEN"
"""The environment variable."""


def read_token() -> bytes | None:
    """The token of this environment, if there is one."""
    return os.environ.get(TOKEN, "").encode() or None


def is_loopback(host: str) -> bool:
    """Whether nobody on other hosts reaches ``host``, as far as names can be resolved."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(address[0]).is_loopback for *_, address in found)


def check_token(host: str, key: str) -> None:
    """Refuse to talk to other hosts without a token; ``key`` is what names ``host``."""
    if read_token() is None and not is_loopback(host):
        raise ConfigError(
            f"{key}={host} is no loopback address, and whoever reaches it could run code there. Set the environment "
            f"variable {TOKEN} to the same secret for `rlightning serve` and for the trainer."
        )
