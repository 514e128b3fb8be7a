"""Sources of prompt sets: names of files, and rows in memory, such as DataFrames."""

import sys
from collections.abc import Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from rlightning.data import sources
from rlightning.data.rows import FilledRows, HeldRows, JoinedRows, Row
from rlightning.data.sources import RowTable, from_dataset, read_rows
from rlightning.errors import ConfigError
from rlightning.foreign_text import cut_value

if TYPE_CHECKING:
    import datasets
    from typing_extensions import TypeIs

    class DataFrame(Protocol):
        """A DataFrame of pandas, polars or pyarrow."""

        def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
            """Export the columns by Arrow's PyCapsule interface."""

        @property
        def columns(self) -> Iterable[object]:
            """The names of the columns, as in pandas and polars."""

    PromptSource = str | Path | Iterable[str | Path | Mapping[str, Any]] | DataFrame
    """A file or another name that :func:`~rlightning.data.sources.read_rows` accepts, several of them, or rows."""
else:

    class _CheckedByReader:
        """Makes pydantic accept any object without reading its rows; :func:`check_source` checks it later."""

        def __get_pydantic_core_schema__(self, source: object, handler: object) -> object:
            from pydantic_core import core_schema

            return core_schema.any_schema()

    # What a configuration file can hold; jsonargparse converts to this type.
    PromptSource = Annotated[str | Sequence[str] | Iterable[dict[str, Any]], _CheckedByReader()]

Environments = str | Mapping[str, str] | None
"""The name of an environment for all rows of a prompt set, or one for those of each path."""
_FORMS = "a path, a list of paths, a datasets.Dataset, a list of dicts, or a DataFrame"


@dataclass(frozen=True, slots=True)
class JoinedTable(RowTable):
    """The rows of several files as one prompt set, in which errors still name a row by its own file and line."""

    tables: Sequence[RowTable] = ()

    def where(self, row: int) -> str:
        """Return the file and the line of a row."""
        for table in self.tables:
            if row < len(table.rows):
                return table.where(row)
            row -= len(table.rows)
        raise IndexError(row)


def paths_of(source: object) -> list[str]:
    """Return the paths of a prompt set's source, of files, folders or hub sets; an empty list if it contains rows."""
    listed = source if isinstance(source, list | tuple) else [source]
    return [str(path) for path in listed] if all(isinstance(path, str | Path) for path in listed) else []


def check_source(source: object, key: str) -> None:
    """Raise a ConfigError if the source of a prompt set has an unsupported type; reads nothing.

    ``key`` is the source's key, such as ``data.train``.
    """
    if source is None or paths_of(source) or _is_table(source):
        return
    kind = type(source).__name__
    fault = ""
    if isinstance(source, Mapping):
        fault = f" is a {kind}. Give rows: a list of dicts, one a prompt, or Dataset.from_dict(...)"
        if source and all(map(_is_table, source.values())):
            named = [str(name) for name in source]
            fault = f" has the splits {', '.join(named)}. Give one of them: data['{named[0]}']"
    elif hasattr(source, "batch_size") and hasattr(source, "dataset"):
        fault = f" is a {kind}, which gives batches. Give its rows: {key.split('.')[-1]}=loader.dataset"
    elif _is_of(source, "polars", "LazyFrame"):
        fault = " is a LazyFrame. Give its rows: frame.collect()"
    elif callable(source) and not isinstance(source, Iterable):
        fault = " is a function. Give what it returns: call it"
    elif not isinstance(source, Iterable) and not hasattr(source, "__getitem__"):
        fault = f"={cut_value(source)} is no prompt set. Give {_FORMS}"
    if fault:
        raise ConfigError(f"{key}{fault}.")


def hold_rows(source: "PromptSource", limit: int | None, key: str, limit_key: str) -> "PromptSource":
    """Return a prompt set's source that can be read repeatedly; an iterator's rows are copied to a list.

    Args:
        key: configuration key of the source, for errors.
        limit_key: configuration key of the limit, for errors.

    Raises:
        ConfigError: if the source has neither a length nor a limit.
    """
    if isinstance(source, str | Path | list | tuple) or _is_table(source):
        return source
    length: int | None = None
    if isinstance(source, Sized):
        with suppress(TypeError):  # a DataLoader over a stream has a __len__ that fails
            length = len(source)
    if length is None and limit is None:
        raise ConfigError(
            f"{key} is a {type(source).__name__}, whose number of rows is not known. Say how many to take by "
            f"{limit_key}, or give a list."
        )
    return list(islice(iter(source), min(number for number in (length, limit) if number is not None)))


def read_source(source: "PromptSource", limit: int | None, key: str, environment: Environments = None) -> RowTable:
    """Return the rows of a prompt set from any supported source; raise a ConfigError if it has none.

    Args:
        source: a path, paths, or rows, from :func:`hold_rows`.
        limit: read only this many rows from the start.
        key: configuration key of the source, by which errors name rows in memory.
        environment: name for rows without one in their column ``environment``, or one for each path.
    """
    if paths := paths_of(source):
        return _read_files(paths, limit, environment)
    rows = _unpack(source, key) if _is_table(source) else source
    table = _from_list(rows, limit, key) if isinstance(rows, list | tuple) else from_dataset(key, rows, None, limit)
    if not len(table.rows):
        raise ConfigError(f"The prompt set '{key}' is empty. Give at least one row.")
    return _fill_environment(table, None if isinstance(environment, Mapping) else environment)


def _read_files(paths: Sequence[str], limit: int | None, environment: Environments) -> RowTable:
    tables: list[RowTable] = []
    for path in paths:
        num_rows = sum(len(table.rows) for table in tables)
        if limit is None or num_rows < limit:
            table = read_rows(path, None if limit is None else limit - num_rows)
            own = environment.get(path) if isinstance(environment, Mapping) else environment
            tables.append(_fill_environment(table, own))
    if len(tables) == 1:
        return tables[0]
    joined = JoinedRows([table.rows for table in tables])
    is_small = len(joined) <= sources.MAX_ROWS_IN_MEMORY and all(isinstance(table.rows, list) for table in tables)
    return JoinedTable(
        path=f"{paths[0]} and {len(paths) - 1} more",
        rows=joined[:] if is_small else joined,
        unit="row",
        places=range(1, len(joined) + 1),
        has_fixed_fields=any(table.has_fixed_fields for table in tables),
        tables=tables,
    )


def _fill_environment(table: RowTable, environment: str | None) -> RowTable:
    if environment is None:
        return table
    rows = FilledRows(table.rows, environment)
    return replace(table, rows=rows[:] if isinstance(table.rows, list) else rows)


def _from_list(source: Sequence[Any], limit: int | None, key: str) -> RowTable:
    chosen = source if limit is None or limit >= len(source) else source[:limit]
    for place, row in enumerate(chosen, 1):
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"{key}, row {place} is a {type(row).__name__}. Give a dict with a column for the prompt."
            )
        _refuse_names(row, f"{key}, row {place}")
    rows: Sequence[Row] = chosen if all(isinstance(row, dict) for row in chosen) else [dict(row) for row in chosen]
    is_large = len(rows) > sources.MAX_ROWS_IN_MEMORY
    return RowTable(key, HeldRows(rows) if is_large else rows, "row", range(1, len(rows) + 1))


def _refuse_names(names: Iterable[object], where: str) -> None:
    wrong = next((name for name in names if not isinstance(name, str)), None)
    if wrong is not None:
        raise ConfigError(f"{where} has the column {cut_value(wrong)}. A column's name must be text.")


_TABLES = (("datasets", "Dataset"), ("pandas", "DataFrame"), ("polars", "DataFrame"), ("pyarrow", "Table"))


def _is_table(source: object) -> "TypeIs[DataFrame]":
    return any(_is_of(source, *names) for names in _TABLES)


def _is_of(source: object, module: str, name: str) -> bool:
    """Return whether a source is an instance of a class in a package, without importing the package."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(source, kind)


def _unpack(table: "DataFrame", key: str) -> "datasets.Dataset | list[Row]":
    """Convert any package's DataFrame to a ``datasets.Dataset``, without a copy if possible, or to a list of rows."""
    import datasets
    import pandas
    import pyarrow

    if isinstance(table, datasets.Dataset):
        if table.format["type"] == "custom":
            raise ConfigError(f"{key} has a transform, which is not applied to rows. Use map() in place of it.")
        return table
    names = [*(table.column_names if isinstance(table, pyarrow.Table) else table.columns)]
    _refuse_names(names, key)
    sources.refuse_duplicates(names, key)
    if isinstance(table, pyarrow.Table):
        return datasets.Dataset(table)
    if not isinstance(table, pandas.DataFrame):
        return datasets.Dataset.from_polars(table)
    try:
        return datasets.Dataset.from_pandas(table, preserve_index=False)
    except pyarrow.ArrowException:  # a column holds values of several types
        return table.astype(object).where(table.notna(), None).to_dict("records")
