"""Reads a prompt set into rows: JSON lines, JSON, CSV, Parquet, a folder saved by ``datasets``, or a hub name."""

import csv
import difflib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from rlightning.data.cache import file_digest
from rlightning.data.rows import ArrowRows, Row, common_columns, write_batches, write_json_rows
from rlightning.errors import ConfigError, did_you_mean
from rlightning.foreign_text import cut_line

if TYPE_CHECKING:
    import pyarrow
    from datasets import Dataset, DatasetDict

MAX_BYTES_IN_MEMORY = 8 * 2**20
"""Maximum size in bytes of a text file whose rows are read into memory; rows of larger ones stay on disk."""
MAX_ROWS_IN_MEMORY = 10_000
"""Maximum number of rows of a table in memory, if known; rows of larger tables stay on disk."""

MAX_NESTING = 100
"""Maximum nesting of lists and objects in a row: pickling, by which rows reach reward functions, fails at some 300."""

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+){0,2}")
_PROMPTS_HINT = "Prompts themselves are given as [{'prompt': ...}]: texts are names of files."


@dataclass(frozen=True, slots=True)
class RowTable:
    """The rows of one prompt set, with the line or row number of each in its file, for error messages.

    Attributes:
        path: the set's name, as given by the user.
        rows: the rows in the order of the file: a list, or :class:`~rlightning.data.rows.StoredRows` for a large set.
        unit: what ``places`` count, "line" or "row".
        places: the line or row number of each row in the file, counted from 1.
        has_fixed_fields: whether every row has all fields, null if it has no value.
    """

    path: str
    rows: Sequence[Row]
    unit: str
    places: Sequence[int]
    has_fixed_fields: bool = False

    def where(self, row: int) -> str:
        """Return the place of a row, such as "train.jsonl, line 7"."""
        return f"{self.path}, {self.unit} {self.places[row]}"

    @property
    def columns(self) -> set[str]:
        """The columns that every row has."""
        return common_columns(self.rows)


def read_rows(path: str, limit: int | None = None) -> RowTable:
    """Return the rows of the prompt set in a file, in a folder, or on the hub; raise a ConfigError if there are none.

    Args:
        path: a file (.jsonl, .json, .csv, .parquet), a folder of ``datasets.save_to_disk`` (``folder:split`` if it has
            several splits), or a hub name: ``owner/name``, ``owner/name:split`` or ``owner/name:config:split``.
        limit: read only this many rows from the start.

    Returns:
        At least one row.
    """
    file = _expand(path)
    try:
        is_folder = file.is_dir()
    except OSError as error:  # a text, not a file name
        raise ConfigError(f"'{cut_line(path)}' is no file: {error.strerror}. {_PROMPTS_HINT}") from error
    if is_folder:
        table = _read_folder(path, file, None, limit)
    elif not file.is_file():
        table = _read_named(path, limit)
    elif file.suffix == ".parquet":
        table = _read_parquet(path, file, limit)
    elif file.suffix in _READERS:
        table = _read_text(path, file, limit)
    else:
        raise ConfigError(
            f"'{path}' is no prompt set: its name ends in none of {', '.join(_SUFFIXES)}. Convert it to one."
        )
    if not len(table.rows):
        raise ConfigError(f"The prompt set '{path}' is empty. Give a file with at least one row.")
    return table


def _read_text(path: str, file: Path, limit: int | None) -> RowTable:
    unit, read = _READERS[file.suffix]
    is_small = limit is not None and limit <= MAX_ROWS_IN_MEMORY
    if is_small or file.stat().st_size <= MAX_BYTES_IN_MEMORY:
        numbered = list(islice(read(path, file), limit))
        return RowTable(path, [row for _, row in numbered], unit, [place for place, _ in numbered])
    parts = {"content": file_digest(file), "suffix": file.suffix, "limit": limit}
    rows, places = write_json_rows(islice(read(path, file), limit), parts)
    return RowTable(path, rows, unit, places)


def _read_json_lines(path: str, file: Path) -> Iterator[tuple[int, Row]]:
    with file.open("rb") as lines:
        for place, line in enumerate(lines, 1):
            if not line.isspace():
                where = f"{path}, line {place}"
                row = _parse(line, f"{where} is not JSON", "Write one JSON object a line.", where)
                yield place, _require_object(row, where)


def _read_json(path: str, file: Path) -> Iterator[tuple[int, Row]]:
    content = _parse(file.read_bytes(), f"'{path}' is not JSON", "If it holds one object a line, name it .jsonl.", path)
    if not isinstance(content, list):
        raise ConfigError(f"'{path}' holds a JSON {type(content).__name__}. Write a list of objects, one a prompt.")
    for place, row in enumerate(content, 1):
        yield place, _require_object(row, f"{path}, row {place}")


def _parse(text: bytes, what: str, way_out: str, where: str) -> object:
    def unique(pairs: list[tuple[str, object]]) -> Row:
        found = dict(pairs)
        if len(found) < len(pairs):
            refuse_duplicates([name for name, _ in pairs], where)
        return found

    too_deep = f"lists or objects are nested more than {MAX_NESTING} deep. Flatten them, or write them as a text."
    try:
        content = json.loads(text, object_pairs_hook=unique)
    except ConfigError:
        raise
    except RecursionError as error:
        raise ConfigError(f"{what} that can be read: {too_deep}") from error
    except ValueError as error:
        raise ConfigError(f"{what}: {error}. {way_out}") from error
    if text.count(b"[") + text.count(b"{") > MAX_NESTING and not _is_flat(content):
        raise ConfigError(f"{where}: {too_deep}")
    return content


def _is_flat(content: object) -> bool:
    """Return whether the lists and objects in a JSON value are nested at most ``MAX_NESTING`` levels deep."""
    level = [content]
    for _ in range(MAX_NESTING):
        level = [part for one in level if isinstance(one, dict) for part in one.values()] + [
            part for one in level if isinstance(one, list) for part in one
        ]
    return not any(isinstance(one, dict | list) for one in level)


def _require_object(row: object, where: str) -> Row:
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is a JSON {type(row).__name__}. Write an object with a column for the prompt.")
    return row


def refuse_duplicates(names: Sequence[str], where: str) -> None:
    """Raise a ConfigError if two columns have the same name."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{where} names '{twice}' twice. Rename or remove one of them.")


def _read_csv(path: str, file: Path) -> Iterator[tuple[int, Row]]:
    csv.field_size_limit(2**31 - 1)  # the default rejects cells of more than 131,072 characters
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        place = 1
        try:
            header = next(reader, [])
            refuse_duplicates(header, f"{path}, line 1")
            place = reader.line_num + 1
            for cells in reader:
                if cells and len(cells) != len(header):
                    rule = f"has {len(cells)} cells where the header has {len(header)}. Quote cells that hold commas."
                    raise ConfigError(f"{path}, line {place} {rule}")
                if cells:
                    yield place, dict(zip(header, cells, strict=True))
                place = reader.line_num + 1  # a quoted cell may span lines: a row's number is that of its first line
        except csv.Error as error:
            raise ConfigError(
                f"{path}, line {place} is not CSV: {error}. Correct the row that begins there."
            ) from error
        except UnicodeDecodeError as error:
            # Bytes are read ahead: the reader has not reached this line yet.
            with file.open("rb") as raw:
                lines_in_bytes = enumerate(raw, 1)
                place = next(number for number, line in lines_in_bytes if line.decode(errors="ignore").encode() != line)
            raise ConfigError(f"{path}, line {place} is not UTF-8: {error.reason}. Save the file as UTF-8.") from error


_READERS: dict[str, tuple[str, Callable[[str, Path], Iterator[tuple[int, Row]]]]] = {
    ".jsonl": ("line", _read_json_lines),
    ".json": ("row", _read_json),
    ".csv": ("line", _read_csv),
}
_SUFFIXES = (*_READERS, ".parquet")


def _read_parquet(path: str, file: Path, limit: int | None) -> RowTable:
    import pyarrow
    import pyarrow.parquet

    try:
        parquet = pyarrow.parquet.ParquetFile(file)
        refuse_duplicates(parquet.schema_arrow.names, path)
        num_rows = parquet.metadata.num_rows if limit is None else min(limit, parquet.metadata.num_rows)
        batches = _first_rows(parquet.iter_batches(batch_size=1000), num_rows)
        rows: Sequence[Row]
        if num_rows > MAX_ROWS_IN_MEMORY and _can_map(parquet.schema_arrow):
            parts = {"content": file_digest(file), "limit": limit}
            rows = write_batches(batches, parquet.schema_arrow, parts)
        else:
            rows = [row for batch in batches for row in batch.to_pylist()]
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"'{path}' is not Parquet: {_first_line(error)}. Write it anew.") from error
    return RowTable(path, rows, "row", range(1, len(rows) + 1), has_fixed_fields=True)


def _first_rows(batches: "Iterator[pyarrow.RecordBatch]", count: int) -> "Iterator[pyarrow.RecordBatch]":
    for batch in batches:
        if count <= 0:
            return
        yield batch.slice(0, count)
        count -= batch.num_rows


def _can_map(schema: "pyarrow.Schema") -> bool:
    """Return whether ``datasets`` supports each type in a schema."""
    import datasets

    try:
        datasets.Features.from_arrow_schema(schema)
    except ValueError:
        return False
    return True


def _read_named(path: str, limit: int | None) -> RowTable:
    """Read a set whose name is neither a file nor a folder: ``folder:split``, or a set on the hub."""
    name, *options = path.split(":")
    folder = _expand(name)
    if folder.is_dir() and len(options) == 1:
        return _read_folder(path, folder, options[0], limit)
    root = folder.parts[0] if folder.parts else ""
    is_local = len(folder.parts) > 1 and Path(root).is_dir()
    if is_local or folder.suffix in _SUFFIXES or not _HUB_NAME.fullmatch(path):
        is_text = not _HUB_NAME.fullmatch(path) and (folder.suffix not in _SUFFIXES or " " in folder.name)
        hint = f" {_PROMPTS_HINT}" if is_text else ""
        raise ConfigError(f"There is no file '{cut_line(path)}'. {_nearest_file(folder)}{hint}")
    return _read_hub(path, name, options, limit)


def _read_folder(path: str, folder: Path, split: str | None, limit: int | None) -> RowTable:
    import datasets

    if not ((folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()):
        raise ConfigError(f"The folder '{path}' was not saved by datasets' save_to_disk. {_nearest_file(folder / 'x')}")
    loaded = datasets.load_from_disk(str(folder))
    return from_dataset(path, loaded, split, limit)


def _read_hub(path: str, name: str, options: list[str], limit: int | None) -> RowTable:
    import datasets

    config = options[0] if len(options) == 2 else None
    split = options[-1] if options else None
    try:
        loaded = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError) as error:
        rule = f"is no file, and the hub's set cannot be loaded: {_first_line(error)}."
        raise ConfigError(f"'{path}' {rule} Write a path, or owner/name:config:split.") from error
    return from_dataset(path, loaded, None, limit)


def from_dataset(path: str, loaded: "Dataset | DatasetDict", split: str | None, limit: int | None) -> RowTable:
    """Return the rows of a ``datasets.Dataset``, or of one of several splits."""
    if isinstance(loaded, dict):
        if split is None and len(loaded) == 1:
            split = next(iter(loaded))
        if split is None:
            raise ConfigError(f"'{path}' has the splits {', '.join(loaded)}. Name one: '{path}:{next(iter(loaded))}'.")
        if split not in loaded:
            raise ConfigError(f"'{path}' has no split '{split}'. {did_you_mean(split, loaded)}")
        loaded = loaded[split]
    elif split is not None:
        raise ConfigError(f"'{path}' names a split, but the folder holds a single set. Leave out ':{split}'.")
    if limit is not None and limit < len(loaded):
        loaded = loaded.select(range(limit))
    rows: Sequence[Row] = ArrowRows(loaded, digest=loaded._fingerprint, columns=loaded.column_names)
    if len(loaded) <= MAX_ROWS_IN_MEMORY:
        rows = rows[:]
    return RowTable(path, rows, "row", range(1, len(rows) + 1), has_fixed_fields=True)


def _expand(path: str) -> Path:
    """Return a path with ``~`` replaced by the user's home, unless ``~`` is followed by an unknown user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def _nearest_file(missing: Path) -> str:
    """Return a sentence that names the existing file or folder with the name most like a missing path's."""
    wanted, folder = missing.name, missing.parent
    while not folder.is_dir():
        wanted, folder = folder.name, folder.parent
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() or entry.suffix in _SUFFIXES)
    nearest = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    if nearest:
        return f"Did you mean '{folder / nearest[0]}'?"
    return f"'{folder}' holds: {', '.join(names[:8])}." if names else f"'{folder}' holds no prompt set."


def _first_line(error: BaseException) -> str:
    return cut_line((str(error).strip() or type(error).__name__).splitlines()[0]).rstrip(".")
