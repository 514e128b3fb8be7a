"""Reads a prompt set into rows: JSON lines, JSON, CSV, Parquet, a folder saved by ``datasets``, or a hub name."""

import csv
import difflib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rlightning.errors import ConfigError, did_you_mean

Row = dict[str, Any]

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+){0,2}")


@dataclass(frozen=True, slots=True)
class RowTable:
    """The rows of one set and where each stands, so that an error can say it.

    Attributes:
        path: the set as the user named it.
        rows: in the order of the file.
        unit: what ``places`` counts, "line" or "row".
        places: one a row, counted from 1.
    """

    path: str
    rows: list[Row]
    unit: str
    places: list[int]

    def where(self, row: int) -> str:
        """The place of a row, such as "train.jsonl, line 7"."""
        return f"{self.path}, {self.unit} {self.places[row]}"

    @property
    def columns(self) -> set[str]:
        """The columns that every row has."""
        return set.intersection(*(set(row) for row in self.rows))


def read_rows(path: str, limit: int | None = None) -> RowTable:
    """Read the set at ``path``.

    Args:
        path: a file (.jsonl, .json, .csv, .parquet), a folder of ``datasets.save_to_disk`` (``folder:split`` where it
            holds several splits), or a hub name: ``owner/name``, ``owner/name:split`` or ``owner/name:config:split``.
        limit: read only this many rows from the start.

    Returns:
        At least one row.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        table = _read_folder(path, file, None)
    elif file.is_file():
        reader = _READERS.get(file.suffix)
        if reader is None:
            raise ConfigError(
                f"'{path}' is no prompt set: its name ends in none of {', '.join(_READERS)}. Convert it to one."
            )
        table = reader(path, file, limit)
    else:
        table = _read_named(path)
    if not table.rows:
        raise ConfigError(f"The prompt set '{path}' is empty. Give a file with at least one row.")
    return RowTable(table.path, table.rows[:limit], table.unit, table.places[:limit])


def _read_json_lines(path: str, file: Path, limit: int | None) -> RowTable:
    rows: list[Row] = []
    places: list[int] = []
    with file.open("rb") as lines:
        for place, line in enumerate(lines, 1):
            if limit is not None and len(rows) == limit:
                break
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(
                    f"{path}, line {place} is not JSON: {error}. Write one JSON object a line."
                ) from error
            rows.append(_require_object(row, f"{path}, line {place}"))
            places.append(place)
    return RowTable(path, rows, "line", places)


def _read_json(path: str, file: Path, limit: int | None) -> RowTable:
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ConfigError(f"'{path}' is not JSON: {error}. If it holds one object a line, name it .jsonl.") from error
    if not isinstance(content, list):
        raise ConfigError(f"'{path}' holds a JSON {type(content).__name__}. Write a list of objects, one a prompt.")
    rows = [_require_object(row, f"{path}, row {place}") for place, row in enumerate(content, 1)]
    return RowTable(path, rows, "row", list(range(1, len(rows) + 1)))


def _require_object(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is a JSON {type(row).__name__}. Write an object with a column for the prompt.")
    return row


def _read_csv(path: str, file: Path, limit: int | None) -> RowTable:
    rows: list[Row] = []
    places: list[int] = []
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        try:
            header = next(reader, [])
            place = reader.line_num + 1
            for cells in islice(reader, limit):
                if cells:
                    if len(cells) != len(header):
                        rule = (
                            f"has {len(cells)} cells where the header has {len(header)}. Quote cells that hold commas."
                        )
                        raise ConfigError(f"{path}, line {place} {rule}")
                    rows.append(dict(zip(header, cells, strict=True)))
                    places.append(place)
                place = reader.line_num + 1  # a quoted cell may span lines: a row stands where it begins
        except (csv.Error, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path}, line {reader.line_num + 1} is not UTF-8 CSV: {error}. Mend the line."
            ) from error
    return RowTable(path, rows, "line", places)


def _read_parquet(path: str, file: Path, limit: int | None) -> RowTable:
    import pyarrow
    import pyarrow.parquet

    try:
        batches: Iterator[Any] = pyarrow.parquet.ParquetFile(file).iter_batches()
        rows: list[Row] = []
        for batch in batches:
            rows += batch.to_pylist()
            if limit is not None and len(rows) >= limit:
                break
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"'{path}' is not Parquet: {_first_line(error)}. Write it anew.") from error
    return RowTable(path, rows, "row", list(range(1, len(rows) + 1)))


_READERS: dict[str, Callable[[str, Path, int | None], RowTable]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _read_named(path: str) -> RowTable:
    """Read what is neither a file nor a folder: ``folder:split``, or a set on the hub."""
    name, *options = path.split(":")
    folder = Path(name).expanduser()
    if folder.is_dir() and len(options) == 1:
        return _read_folder(path, folder, options[0])
    root = folder.parts[0] if folder.parts else ""
    is_local = len(folder.parts) > 1 and Path(root).is_dir()
    if is_local or folder.suffix in _READERS or not _HUB_NAME.fullmatch(path):
        raise ConfigError(f"There is no file '{path}'. {_nearest_file(folder)}")
    return _read_hub(path, name, options)


def _read_folder(path: str, folder: Path, split: str | None) -> RowTable:
    import datasets

    if not ((folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()):
        raise ConfigError(f"The folder '{path}' was not saved by datasets' save_to_disk. {_nearest_file(folder / 'x')}")
    loaded = datasets.load_from_disk(str(folder))
    return _from_dataset(path, loaded, split)


def _read_hub(path: str, name: str, options: list[str]) -> RowTable:
    import datasets

    config = options[0] if len(options) == 2 else None
    split = options[-1] if options else None
    try:
        loaded = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError) as error:
        rule = f"is no file, and the hub's set cannot be loaded: {_first_line(error)}."
        raise ConfigError(f"'{path}' {rule} Write a path, or owner/name:config:split.") from error
    return _from_dataset(path, loaded, None)


def _from_dataset(path: str, loaded: Any, split: str | None) -> RowTable:
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
    rows: list[Row] = loaded.with_format(None).to_list()
    return RowTable(path, rows, "row", list(range(1, len(rows) + 1)))


def _nearest_file(missing: Path) -> str:
    """A sentence about what is there instead of ``missing``: the nearest name in the nearest folder that exists."""
    wanted, folder = missing.name, missing.parent
    while not folder.is_dir():
        wanted, folder = folder.name, folder.parent
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() or entry.suffix in _READERS)
    nearest = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    if nearest:
        return f"Did you mean '{folder / nearest[0]}'?"
    return f"'{folder}' holds: {', '.join(names[:8])}." if names else f"'{folder}' holds no prompt set."


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
