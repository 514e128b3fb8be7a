"""The address at which clients reach a server on this host."""

import contextlib
import ipaddress
import socket

FAR = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses that are reserved for documentation (RFC 5737, RFC 3849): no host has them, and nothing is sent there."""
LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}


def find_address(host: str) -> str:
    """Return the address at which clients reach a server that listens on ``host``: the same, unless it is a wildcard.

    For a wildcard such as 0.0.0.0, return the address from which this host connects to others, or its loopback address.
    """
    try:
        if not ipaddress.ip_address(host or "0.0.0.0").is_unspecified:
            return host
    except ValueError:  # a name
        return host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as end:
        end.connect((FAR[family], 9))
        return str(end.getsockname()[0])
    return LOOPBACK[family]
