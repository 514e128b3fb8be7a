"""The run's key, a secret that engines and trainers on other hosts share. Does not import torch."""

import ipaddress
import os
import socket

from rlightning.errors import ConfigError

RUN_KEY_VARIABLE = "RLIGHTNING_RUN_KEY"
"""Environment variable with the run's key."""
OLD_VARIABLE = "RLIGHTNING_ENGINE_TOKEN"


def read_key() -> bytes | None:
    """Return the run's key, which trainer and engines share, from the environment; None if it is not set.

    Raises:
        ConfigError: the variable's name in earlier versions is set instead.
    """
    if OLD_VARIABLE in os.environ:
        raise ConfigError(f"{OLD_VARIABLE} is now called {RUN_KEY_VARIABLE}. Rename it.")
    return os.environ.get(RUN_KEY_VARIABLE, "").encode() or None


def environment_without_key() -> dict[str, str]:
    """Return this process's environment variables without the run's key, for programs that do not need it."""
    return {name: value for name, value in os.environ.items() if name != RUN_KEY_VARIABLE}


def is_loopback(host: str) -> bool:
    """Return whether ``host`` resolves only to loopback addresses."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(address[0]).is_loopback for *_, address in found)


def check_key(host: str, name: str) -> None:
    """Raise a ConfigError if ``host``, the value of option ``name``, is no loopback address and there is no run key."""
    if read_key() is None and not is_loopback(host):
        raise ConfigError(
            f"{name}={host} is no loopback address, and any client could use what is served there. Set the "
            f"environment variable {RUN_KEY_VARIABLE} to the same secret for `rlightning serve` and for the trainer."
        )
