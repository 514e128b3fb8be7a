"""Rows that stay on disk: Arrow files, memory-mapped, so that all processes of a host share their pages."""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from rlightning.data.cache import cached_folder

Row = dict[str, Any]

_ROWS_A_BATCH = 1000
_VERSION = 1  # of what is written; files of another are not read


class ArrowRows(Sequence[Row]):
    """A table of ``datasets`` as a sequence of rows, each of which is made when it is asked for.

    Args:
        dataset: a ``datasets.Dataset``; with ``is_json`` its column ``row`` holds rows as JSON.
        digest: of the content.
        columns: what every row has.
        is_json: whether rows are JSON, which holds what columns of one type each could not.
    """

    def __init__(self, dataset: Any, *, digest: str, columns: Iterable[str], is_json: bool = False) -> None:
        self._dataset = dataset.with_format("arrow")
        self.digest = digest
        self.columns = set(columns)
        self._is_json = is_json

    def __len__(self) -> int:
        return len(self._dataset)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        rows: list[Row] = self._dataset[index].to_pylist()
        if self._is_json:
            rows = [json.loads(row["row"]) for row in rows]
        return rows if isinstance(index, slice) else rows[0]


def write_json_rows(numbered: Iterable[tuple[int, Row]], parts: dict[str, Any]) -> tuple[ArrowRows, NDArray[np.int64]]:
    """Write rows of any types into a file of the cache, unless it is there.

    Args:
        numbered: the rows, each after its place in its file.
        parts: what the rows follow from.

    Returns:
        The rows and their places.
    """
    import datasets

    def build(folder: Path) -> None:
        columns, places = _write(folder / "rows.arrow", iter(numbered))
        np.save(folder / "places.npy", places)
        (folder / "columns.json").write_text(json.dumps(sorted(columns)))

    folder = cached_folder({"kind": "rows", "version": _VERSION, **parts}, build)
    rows = ArrowRows(
        datasets.Dataset.from_file(str(folder / "rows.arrow")),
        digest=folder.name,
        columns=json.loads((folder / "columns.json").read_text()),
        is_json=True,
    )
    return rows, np.load(folder / "places.npy")


def write_batches(batches: Iterable[Any], schema: Any, parts: dict[str, Any]) -> ArrowRows:
    """Write record batches of pyarrow into a file of the cache, unless it is there."""
    import datasets
    import pyarrow

    def build(folder: Path) -> None:
        path = str(folder / "rows.arrow")
        with pyarrow.OSFile(path, "wb") as file, pyarrow.ipc.new_stream(file, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)

    folder = cached_folder({"kind": "batches", "version": _VERSION, **parts}, build)
    dataset = datasets.Dataset.from_file(str(folder / "rows.arrow"))
    return ArrowRows(dataset, digest=folder.name, columns=schema.names)


def _write(path: Path, numbered: Iterator[tuple[int, Row]]) -> tuple[set[str], NDArray[np.int64]]:
    """Write rows as JSON; the columns that all have, and their places."""
    import pyarrow

    schema = pyarrow.schema([("row", pyarrow.binary())])
    columns: set[str] | None = None
    places: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, schema) as writer:
        while batch := list(islice(numbered, _ROWS_A_BATCH)):
            for _, row in batch:
                columns = set(row) if columns is None else columns & row.keys()
            encoded = [json.dumps(row).encode() for _, row in batch]
            writer.write_batch(pyarrow.record_batch([pyarrow.array(encoded, pyarrow.binary())], schema=schema))
            places.append(np.array([place for place, _ in batch], np.int64))
    return columns or set(), np.concatenate(places)
