"""What checksums cost: a checkpoint of some GB is written, sealed, compared with its checksum, and its weights checked.

python benchmarks/checksums.py --gigabytes 20 --folder /tmp
"""

import argparse
import os
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from rlightning.checksums import seal_file, verify_file
from rlightning.models.finite import find_not_finite

PART_BYTES = 1 << 28


def seconds(work: Callable[..., Any], *args: Any) -> float:
    """How long a call takes."""
    start = perf_counter()
    work(*args)
    return perf_counter() - start


def write(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """As a checkpoint is: to the disk, not to its cache alone."""
    torch.save(tensors, path)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def crc32(path: Path) -> None:
    """Of a whole file, on one thread."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            value = zlib.crc32(chunk, value)


def main() -> None:
    """Measure and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    count = max(1, round(options.gigabytes * 1e9 / PART_BYTES))
    tensors = {str(number): torch.randn(PART_BYTES // 4, device=device) for number in range(count)}
    size = count * PART_BYTES / 1e9
    path = Path(options.folder) / f"checksums-{os.getpid()}.ckpt"
    find_not_finite(tensors.items())
    try:
        parts = {
            f"look for NaN on {device.type}": seconds(find_not_finite, tensors.items()),
            "torch.save and fsync": seconds(write, tensors, path),
            "seal_file": seconds(seal_file, path),
            "verify_file, file in memory": seconds(verify_file, path),
            "zlib.crc32 on one thread": seconds(crc32, path),
        }
    finally:
        path.unlink(missing_ok=True)
    lines = [f"{name:<32}{taken:8.2f} s{size / taken:9.1f} GB/s" for name, taken in parts.items()]
    sys.stdout.write("\n".join([f"{size:.1f} GB, {os.cpu_count()} cores", *lines, ""]))


if __name__ == "__main__":
    main()
