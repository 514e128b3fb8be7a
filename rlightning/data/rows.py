"""Sequences of rows that need not be in memory: each row is read on access, and a digest identifies all of them.

Files are memory-mapped, so that all processes of a host share their pages.
"""

import json
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from rlightning.data.cache import cached_folder
from rlightning.data.digests import digest_rows, digest_texts

if TYPE_CHECKING:
    import pyarrow
    from datasets import Dataset

Row = dict[str, Any]
"""Values of any type by column."""
T = TypeVar("T")
_VERSION = 2  # of the file format; files of another version are not read


class LazySequence(Sequence[T]):
    """A sequence whose items are created on access."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Sequence[T]:
        """Return the items from ``start`` to ``stop``, which must exist."""

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...

    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        places = range(len(self))[index]
        if isinstance(places, int):
            return self.read(places, places + 1)[0]
        return self.read(places.start, places.stop) if places.step == 1 else [self[place] for place in places]


class StoredRows(LazySequence[Row]):
    """Rows of a large prompt set with a digest of their content, the key by which their tokens are cached on disk.

    Attributes:
        digest: digest of the content.
        columns: names of the columns that every row has.
    """

    digest: str
    columns: set[str]


class ArrowRows(StoredRows):
    """Rows of a ``datasets.Dataset``; with ``is_json`` its column ``row`` contains each row as JSON.

    JSON allows values of different types in one column.
    """

    def __init__(self, dataset: "Dataset", *, digest: str, columns: Iterable[str], is_json: bool = False) -> None:
        self._dataset = dataset.with_format("arrow")
        self.digest, self.columns = digest, set(columns)
        self._is_json = is_json

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, start: int, stop: int) -> list[Row]:
        """Return the rows from ``start`` to ``stop``."""
        rows: list[Row] = self._dataset[start:stop].to_pylist()
        return [json.loads(row["row"]) for row in rows] if self._is_json else rows


class HeldRows(StoredRows):
    """A long list of rows in this process's memory, which is not copied, with a digest of its content."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self.digest, self.columns = digest_rows(rows), common_columns(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, start: int, stop: int) -> Sequence[Row]:
        """Return the rows from ``start`` to ``stop``."""
        return self._rows[start:stop]


class JoinedRows(StoredRows):
    """The rows of several files, one file after the other."""

    def __init__(self, parts: Sequence[Sequence[Row]]) -> None:
        self._parts = parts
        self.columns = set.intersection(*map(common_columns, parts))
        self.digest = digest_texts(part.digest if isinstance(part, StoredRows) else digest_rows(part) for part in parts)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def read(self, start: int, stop: int) -> list[Row]:
        """Return the rows from ``start`` to ``stop``."""
        rows: list[Row] = []
        for part in self._parts:
            rows += part[max(start, 0) : max(stop, 0)]
            start, stop = start - len(part), stop - len(part)
        return rows


class FilledRows(StoredRows):
    """Rows with the name of an environment in the column ``environment`` wherever the original row has none."""

    def __init__(self, rows: Sequence[Row], environment: str) -> None:
        self._rows, self._environment = rows, environment
        self.columns = common_columns(rows) | {"environment"}
        digest = rows.digest if isinstance(rows, StoredRows) else digest_rows(rows)
        self.digest = digest_texts([digest, "environment", environment])

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, start: int, stop: int) -> list[Row]:
        """Return the rows from ``start`` to ``stop``."""
        own = {"environment": self._environment}
        return [row | own if row.get("environment") in (None, "") else row for row in self._rows[start:stop]]


def common_columns(rows: Sequence[Row]) -> set[str]:
    """Return the columns that every row has."""
    return rows.columns if isinstance(rows, StoredRows) else set(rows[0]).intersection(*rows)


def write_json_rows(
    numbered: Iterable[tuple[int, Row]], parts: Mapping[str, object]
) -> tuple[ArrowRows, Sequence[int]]:
    """Write rows of any types to a cached file, unless it exists; return the file's rows and their line numbers.

    Args:
        numbered: rows with their line numbers in the original file.
        parts: everything that determines the rows, as the key of the cache.
    """
    from datasets import Dataset, Features, Value
    from datasets.arrow_writer import ArrowWriter

    def build(folder: Path) -> None:
        columns: set[str] | None = None
        features = Features({"row": Value("binary"), "place": Value("int64")})
        with ArrowWriter(path=str(folder / "rows.arrow"), features=features, writer_batch_size=1000) as writer:
            for place, row in numbered:
                columns = set(row) if columns is None else columns & row.keys()
                writer.write({"row": json.dumps(row).encode(), "place": place})
            writer.finalize()
        (folder / "columns.json").write_text(json.dumps(sorted(columns or ())))

    folder = cached_folder({"kind": "rows", "version": _VERSION, **parts}, build)
    dataset, columns = Dataset.from_file(str(folder / "rows.arrow")), json.loads((folder / "columns.json").read_text())
    rows = ArrowRows(dataset.select_columns("row"), digest=folder.name, columns=columns, is_json=True)
    places: Sequence[int] = dataset.with_format("numpy")["place"][:]
    return rows, places


def write_batches(
    batches: "Iterable[pyarrow.RecordBatch]", schema: "pyarrow.Schema", parts: Mapping[str, object]
) -> ArrowRows:
    """Write record batches of pyarrow to a cached file, unless it exists; return rows that are read from the file."""
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
