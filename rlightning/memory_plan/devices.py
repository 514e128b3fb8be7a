"""How much memory a device has."""

import re

from rlightning.errors import ConfigError

GIB = 1 << 30
DEVICES = {
    "A10": 22.0,
    "A100-40GB": 39.4,
    "A100-80GB": 79.1,
    "B200": 178.3,
    "H100": 79.1,
    "H200": 139.8,
    "L4": 22.0,
    "L40S": 44.4,
    "RTX4090": 23.5,
}
"""GiB of some GPUs as PyTorch reports them, which is less than their names say."""
UNITS = {"GB": 10**9, "GIB": GIB, "MB": 10**6, "MIB": 1 << 20}


def read_device_memory(text: str) -> int:
    """Bytes of a device.

    Args:
        text: a number with its unit (GB of 10^9 bytes, GiB of 2^30), or a GPU's name.

    Raises:
        ConfigError: if it is neither.
    """
    named = {name.upper(): size for name, size in DEVICES.items()}.get(text.strip().upper())
    if named is not None:
        return int(named * GIB)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([GM]i?B)", text.strip(), flags=re.IGNORECASE)
    if match is None or not float(match[1]):
        raise ConfigError(
            f"--device-memory {text}: give a size, such as 80GB or 79.1GiB, or one of {', '.join(DEVICES)}."
        )
    return int(float(match[1]) * UNITS[match[2].upper()])
