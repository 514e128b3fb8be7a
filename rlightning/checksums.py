"""Checksums of the files that a run saves, by which a damaged copy is detected before it is loaded.

A single file of ``torch.save`` contains its checksum at its end, in the comment of a zip file, and keeps it when
renamed or copied. An exported folder contains the checksums of its files in ``checksums.json``.

A checksum is the XXH3-128 (https://xxhash.com) of the digests of 16 MiB chunks, which several threads compute. It
detects damage by disks, networks and memory, but not forgery.
"""

import json
import os
import struct
import zipfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import xxhash

from rlightning.errors import ConfigError

MANIFEST = "checksums.json"
"""Name of the file with the checksums of the other files in its folder."""
CHUNK_BYTES = 16 << 20
MAX_THREADS = 8
"""Maximum number of threads that read files; more do not read faster from a disk."""
_MARK = b"rlightning XXH3-128 "
_SEAL_BYTES = len(_MARK) + 32

Checksums = Mapping[str, tuple[int, str]]
"""Size in bytes and checksum in hexadecimal digits of each file, by the file's name in its folder."""


class DamagedError(ConfigError):
    """A saved file or folder differs from its checksum, or is incomplete.

    Args:
        path: the file or the folder.
        reason: what is wrong, as a clause.

    Attributes:
        reason: the clause.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} is damaged: {reason}. Use another copy of it, or another one.")
        self.reason = reason


def checksum(path: Path, num_bytes: int | None = None) -> str:
    """Return the checksum of a file, or of its first ``num_bytes``, in hexadecimal digits."""
    if num_bytes is None:
        num_bytes = path.stat().st_size
    starts = range(0, num_bytes, CHUNK_BYTES)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
            digests = pool.map(partial(_digest_chunk, descriptor, num_bytes), starts)
            return xxhash.xxh3_128_hexdigest(b"".join(digests) + struct.pack("<Q", num_bytes))
    finally:
        os.close(descriptor)


def _digest_chunk(descriptor: int, end: int, start: int) -> bytes:
    return xxhash.xxh3_128_digest(os.pread(descriptor, min(CHUNK_BYTES, end - start), start))


# A single file


def seal_file(path: Path) -> None:
    """Write a zip file's checksum into its comment, which must be empty."""
    with path.open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(struct.pack("<H", _SEAL_BYTES))  # how long the comment is
    seal = _MARK + checksum(path).encode()
    with path.open("ab") as file:
        file.write(seal)


def verify_file(path: Path) -> None:
    """Raise a DamagedError if a file of ``torch.save`` does not match its checksum; without one, its records' CRCs."""
    size = path.stat().st_size
    if size == 0:
        raise DamagedError(path, "it is empty")
    with path.open("rb") as file:
        file.seek(max(size - _SEAL_BYTES, 0))
        seal = file.read()
    if not seal.startswith(_MARK):
        _verify_records(path, has_comment=not seal.endswith(b"\0\0"))
    elif checksum(path, size - _SEAL_BYTES).encode() != seal.removeprefix(_MARK):
        raise DamagedError(path, "it is not what was written, by its checksum")


def _verify_records(path: Path, *, has_comment: bool) -> None:
    """Verify a zip file by the CRC-32 of each record, which ``torch.save`` always writes.

    Args:
        path: the file.
        has_comment: whether the zip file has a comment, as after :func:`seal_file`.
    """
    try:
        with zipfile.ZipFile(path) as file:
            wrong = file.testzip()
    except (zipfile.BadZipFile, EOFError, NotImplementedError, OSError) as error:
        raise DamagedError(path, "it is cut short, or no checkpoint") from error
    if wrong is not None or has_comment:
        raise DamagedError(path, "it is not what was written, by its checksum")


# A folder


def checksums_of(folder: Path, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Return the size in bytes and the checksum of each of the folder's files ``names``, by file name."""
    return {name: ((folder / name).stat().st_size, checksum(folder / name)) for name in names}


def verify_files(folder: Path, expected: Checksums) -> None:
    """Raise a DamagedError if a file in ``expected`` is missing, or has another size or checksum."""
    for name, (num_bytes, digest) in expected.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            raise DamagedError(folder, f"'{name}' is missing")
        if size != num_bytes:
            raise DamagedError(folder, f"'{name}' has {size} bytes of {num_bytes}")
        if checksum(path) != digest:
            raise DamagedError(folder, f"'{name}' is not what was written, by its checksum")


def write_manifest(folder: Path) -> None:
    """Write the checksums of all files of a folder to ``checksums.json`` in it."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    text = json.dumps({"xxh3_128_of_16_mib_chunks": checksums_of(folder, names)}, indent=2)
    (folder / MANIFEST).write_text(f"{text}\n", encoding="utf-8")


def verify_manifest(folder: Path) -> None:
    """Raise a DamagedError if a folder's files do not match its ``checksums.json``; a folder without one passes."""
    path = folder / MANIFEST
    if not path.is_file():
        return
    try:
        (written,) = json.loads(path.read_text(encoding="utf-8")).values()
        expected = {str(name): (int(num_bytes), str(digest)) for name, (num_bytes, digest) in written.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise DamagedError(folder, f"'{MANIFEST}' is not what was written") from error
    verify_files(folder, expected)
