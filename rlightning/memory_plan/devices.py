"""The memory and peak FLOP/s of devices."""

import re
from argparse import ArgumentParser

from rlightning.errors import ConfigError

OPTION = "--device-memory"
"""Option of ``rlightning plan`` for a device's memory: a size, or a name of :data:`DEVICES`."""
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
"""Memory of some GPUs in GiB, as PyTorch reports it, which is less than in their names."""
PEAK_FLOPS = {
    "A10": 125e12,
    "A100": 312e12,
    "B200": 2250e12,
    "GH200": 989.4e12,
    "H100": 989.4e12,
    "H100 NVL": 835.5e12,
    "H100 PCIe": 756e12,
    "H200": 989.4e12,
    "H200 NVL": 835.5e12,
    "L4": 121e12,
    "L40S": 362e12,
    "RTX 4090": 165.2e12,
}
"""Operations a second of dense matrix products in bfloat16 with float32 accumulation, by a part of the device's name.

From NVIDIA's data sheets, half of the values "with sparsity": A10, A100, DGX B200 (a system of eight), GH200, H100
(different for SXM, PCIe and NVL boards), H200, L4, L40S; for the RTX 4090 from the white paper of the Ada architecture.
"""
UNITS = {"GB": 10**9, "GIB": 1 << 30, "MB": 10**6, "MIB": 1 << 20}


def split_device_memory(options: list[str]) -> tuple[str | None, list[str]]:
    """Return the value of the option ``--device-memory``, None without it, and the other options; raises a ConfigError
    if the option has no value.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(OPTION, dest="size", nargs="?", const="")
    known, rest = parser.parse_known_args(options)
    if known.size == "":
        raise ConfigError(f"{OPTION}: its value is missing. Write {OPTION} 80GB.")
    return known.size, rest


def read_device_memory(text: str) -> int:
    """Parse the memory of a device to bytes: a number with its unit (GB is 10^9 bytes, GiB 2^30), or a GPU's name."""
    named = {name.upper(): size for name, size in DEVICES.items()}.get(text.strip().upper())
    if named is not None:
        return int(named * UNITS["GIB"])
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([GM]i?B)", text.strip(), flags=re.IGNORECASE)
    if match is None or not float(match[1]):
        raise ConfigError(
            f"--device-memory {text}: give a size, such as 80GB or 79.1GiB, or one of {', '.join(DEVICES)}."
        )
    return int(float(match[1]) * UNITS[match[2].upper()])


def peak_flops(device_name: str) -> float | None:
    """Return a device's peak FLOP/s in bfloat16; None for a device that is not in the table.

    The name is that of ``torch.cuda.get_device_name()``, such as "NVIDIA H100 80GB HBM3".
    """
    if "MIG" in device_name.split():
        return None  # a part of the device
    found = [name for name in PEAK_FLOPS if re.search(rf"\b{name}\b", device_name)]
    return PEAK_FLOPS[max(found, key=len)] if found else None
