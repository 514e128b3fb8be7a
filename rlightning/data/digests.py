"""Digests of prompt sets, by which a resumed run checks that it has the data of the checkpoint."""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def digest_texts(texts: Iterable[str]) -> str:
    """Return one digest of the texts of a prompt set, which depends on their order."""
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        _add(digest, text.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def digest_columns(rows: Iterable[Mapping[str, object]], columns: Collection[str]) -> dict[str, str]:
    """Return a digest of each of the given columns of a prompt set; some rows may lack a column."""
    digests = {column: hashlib.blake2b(digest_size=8) for column in columns}
    for row in rows:
        for column, digest in digests.items():
            _add(digest, encode_value(row[column]) if column in row else b"")
    return {column: digest.hexdigest() for column, digest in digests.items()}


def digest_rows(rows: Iterable[Mapping[str, object]]) -> str:
    """Return one digest of all columns of all rows, which depends on their order."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        _add(digest, encode_value(row))
    return digest.hexdigest()


def encode_value(value: object) -> bytes:
    """Return a value as bytes that are the same in every process: JSON, or Python's repr for other types."""
    try:
        return json.dumps(value, sort_keys=True, default=_describe).encode()
    except (TypeError, ValueError):  # keys that JSON does not have, or a value that contains itself
        return _describe(value).encode("utf-8", "surrogatepass")


def _describe(value: object) -> str:
    if isinstance(value, set | frozenset):  # its order differs between processes
        return f"{type(value).__name__} {sorted(map(_describe, value))}"
    if hasattr(value, "tolist"):  # an array: repr() would shorten it
        return repr(value.tolist())
    return _ADDRESS.sub("", repr(value))


def _add(digest: hashlib.blake2b, encoded: bytes) -> None:
    digest.update(len(encoded).to_bytes(8, "little") + encoded)
