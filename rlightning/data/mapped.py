"""Prompts of large sets on disk: tokenised by ``datasets`` once a host, memory-mapped by each process."""

import json
import os
import signal
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlightning.data.cache import cached_folder
from rlightning.data.digests import digest_columns, digest_texts
from rlightning.data.rows import HeldRows, LazySequence, Row, StoredRows
from rlightning.data.sources import RowTable
from rlightning.data.summary import Summary, summarize
from rlightning.processes.cpu_cores import num_cores
from rlightning.types import Prompt

if TYPE_CHECKING:
    import pyarrow

COLUMNS = {
    "text": "string",
    "token_ids": "list of int32",
    "completion_ids": "list of int32",
    "num_tokens": "int32",
    "notes": "int8",
    "temperature": "float64",
    "max_new_tokens": "int32",
}
"""The columns that an encoder returns for rows, with their types."""
OF_PROMPT = ("text", "token_ids", "completion_ids", "temperature", "max_new_tokens")
"""The columns of :data:`COLUMNS` that become attributes of a :class:`Prompt`."""
Columns = dict[str, list[Any]]
"""The values of some rows, by the names of :data:`COLUMNS`."""
ROWS_A_PROCESS = 10_000
"""Number of rows for which the start of one more process pays off."""
_ROWS_A_BATCH = 1000
_VERSION = 2  # of the tokenization and the file format; files of another version are not read


class RowEncoder(Protocol):
    """Converts rows to the columns of :data:`COLUMNS`; it must be picklable, for the processes of ``datasets``."""

    @property
    def identity(self) -> dict[str, object]:
        """Return all settings that affect the tokens, other than the rows themselves."""

    def encode(self, table: RowTable, start: int, stop: int) -> Columns:
        """Return the values of all :data:`COLUMNS` for the rows from ``start`` to ``stop``."""


class MappedPrompts(LazySequence[Prompt]):
    """Prompts whose tokens are in memory-mapped files of a folder that :func:`map_prompts` has written."""

    def __init__(self, rows: Sequence[Row], folder: Path) -> None:
        import datasets

        self._rows, self._folder = rows, folder
        parts = [datasets.Dataset.from_file(file) for file in _files(folder)]  # one file for each process that wrote
        self._encoded = datasets.concatenate_datasets(parts).with_format("arrow")
        kept = folder / "kept.npy"
        self._kept: NDArray[np.int64] | None = np.load(kept, mmap_mode="r") if kept.is_file() else None
        self.fingerprint: str = json.loads((folder / "summary.json").read_text())["fingerprint"]

    def __len__(self) -> int:
        return len(self._encoded) if self._kept is None else len(self._kept)

    def read(self, start: int, stop: int) -> list[Prompt]:
        """Return the prompts from ``start`` to ``stop``."""
        return [self._make(place if self._kept is None else int(self._kept[place])) for place in range(start, stop)]

    def _make(self, row: int) -> Prompt:
        (encoded,) = self._encoded[row : row + 1].to_pylist()
        return Prompt(index=row, columns=self._rows[row], **{name: encoded[name] for name in OF_PROMPT})

    @property
    def longest_limit(self) -> int:
        """The largest of the prompts' own limits on completion tokens; 0 if no prompt has one."""
        import pyarrow.compute

        return pyarrow.compute.max(self._encoded.data["max_new_tokens"]).as_py() or 0

    def digest_columns(self, columns: Collection[str]) -> dict[str, str]:
        """Return a digest of each of these columns, from a cache if a process of this host has computed it before."""
        if not columns:
            return {}

        def build(folder: Path) -> None:
            (folder / "digests.json").write_text(json.dumps(digest_columns(self._iterate_rows(), columns)))

        parts = {"kind": "columns", "version": _VERSION, "prompts": self._folder.name, "columns": sorted(columns)}
        digests: dict[str, str] = json.loads((cached_folder(parts, build) / "digests.json").read_text())
        return digests

    def _iterate_rows(self) -> Iterator[Row]:
        """Yield the rows of the prompts, reading them in batches."""
        for start in range(0, len(self._rows), _ROWS_A_BATCH):
            batch = self._rows[start : start + _ROWS_A_BATCH]
            if self._kept is None:
                yield from batch
            else:
                first, last = np.searchsorted(self._kept, [start, start + len(batch)])
                yield from (batch[int(place) - start] for place in self._kept[first:last])


def map_prompts(
    table: RowTable, encoder: RowEncoder, max_tokens: int, *, is_dropping: bool
) -> tuple[MappedPrompts, Summary]:
    """Return a large set's prompts, memory-mapped from a cached folder, and statistics; tokenise them if it is missing.

    Args:
        table: a table whose rows are :class:`~rlightning.data.rows.StoredRows`.
        encoder: converts rows to tokens.
        max_tokens: maximum tokens of a prompt.
        is_dropping: whether prompts with more tokens are dropped.
    """
    rows = table.rows
    assert isinstance(rows, StoredRows)

    def build(folder: Path) -> None:
        _map(table, encoder, folder)
        lengths, notes = [np.empty(0, np.int32)], [np.empty(0, np.int8)]

        def kept_texts() -> Iterator[str]:
            for batch in _read_batches(folder):
                lengths.append(batch["num_tokens"].to_numpy().copy())  # a view would keep the whole batch
                notes.append(batch["notes"].to_numpy().copy())
                are_kept = lengths[-1] <= (max_tokens if is_dropping else lengths[-1])
                yield from compress(batch["text"].to_pylist(), are_kept)

        fingerprint = digest_texts(kept_texts())
        num_tokens = np.concatenate(lengths)
        summary = summarize(num_tokens, np.concatenate(notes), max_tokens)
        if is_dropping and summary.num_overlong:
            np.save(folder / "kept.npy", np.flatnonzero(num_tokens <= max_tokens))
        written = {"fingerprint": fingerprint, "summary": asdict(summary)}
        (folder / "summary.json").write_text(json.dumps(written))

    parts = {"kind": "prompts", "version": _VERSION, "rows": [rows.digest, len(rows)], **encoder.identity}
    folder = cached_folder(parts, build)
    saved = json.loads((folder / "summary.json").read_text())["summary"]
    notes = {int(note): (count, first) for note, (count, first) in saved["notes"].items()}
    return MappedPrompts(rows, folder), Summary(**{**saved, "notes": notes})


def _map(table: RowTable, encoder: RowEncoder, folder: Path) -> None:
    import datasets

    num_rows = len(table.rows)
    # Another process would need a copy of rows in memory.
    num_processes = 1 if isinstance(table.rows, HeldRows) else min(num_cores(), num_rows // ROWS_A_PROCESS)
    values = {name: datasets.Value(kind.removeprefix("list of ")) for name, kind in COLUMNS.items()}
    features = {name: datasets.List(value) if "list" in COLUMNS[name] else value for name, value in values.items()}
    with plain_forks():
        datasets.Dataset.from_dict({"row": np.arange(num_rows)}).map(
            _encode,
            batched=True,
            batch_size=_ROWS_A_BATCH,
            remove_columns=["row"],
            features=datasets.Features(features),
            fn_kwargs={"table": table, "encoder": encoder},
            num_proc=num_processes if num_processes > 1 else None,
            cache_file_name=str(folder / "prompts.arrow"),
            new_fingerprint=folder.name,
            desc=f"Tokenising {table.path}",
        )


def _encode(batch: dict[str, list[int]], table: RowTable, encoder: RowEncoder) -> Columns:
    return encoder.encode(table, batch["row"][0], batch["row"][-1] + 1)


@contextmanager
def plain_forks() -> Iterator[None]:
    """Context manager in which forked tokenising processes use one thread each, without a warning, and exit on SIGTERM.

    They would inherit this process's handler of SIGTERM. If it only sets a flag, the pool waits forever for processes
    that it terminates after another one has failed.
    """
    name = "TOKENIZERS_PARALLELISM"
    before, os.environ[name] = os.environ.get(name), "false"
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL) if is_main else None
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _files(folder: Path) -> list[str]:
    return sorted(str(file) for file in folder.glob("prompts*.arrow"))


def _read_batches(folder: Path) -> "Iterator[pyarrow.RecordBatch]":
    """Read the columns of a folder sequentially, without memory-mapping, whose pages would stay resident."""
    import pyarrow

    for name in _files(folder):
        with pyarrow.OSFile(name) as file, pyarrow.ipc.open_stream(file) as batches:
            yield from batches
