"""Rows that are not in one file: those of a long list in memory, and those of several files."""

import bisect
from collections.abc import Sequence
from itertools import accumulate
from typing import overload

from rlightning.data.arrow_rows import ArrowRows, Row
from rlightning.data.digests import digest_rows, digest_texts


class HeldRows(Sequence[Row]):
    """A long list of rows in this process's memory, which is not copied; its digest lets the tokens stay on disk.

    Args:
        rows: the list.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self.columns: set[str] = common_columns(rows)
        self.digest = digest_rows(rows)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return self._rows[index]


class JoinedRows(Sequence[Row]):
    """The rows of several files, one after the other, each as it was read.

    Args:
        parts: of each file.
    """

    def __init__(self, parts: Sequence[Sequence[Row]]) -> None:
        self._parts = parts
        self.ends = list(accumulate(map(len, parts)))
        self.columns: set[str] = set.intersection(*map(common_columns, parts))
        self.digest: str = digest_texts(
            part.digest if isinstance(part, ArrowRows | HeldRows | JoinedRows) else digest_rows(part) for part in parts
        )

    def __len__(self) -> int:
        return self.ends[-1]

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, int):
            part, place = locate_part(self.ends, range(len(self))[index])
            return self._parts[part][place]
        start, stop, step = index.indices(len(self))
        if step != 1:
            return [self[i] for i in range(start, stop, step)]
        rows: list[Row] = []
        for some, end in zip(self._parts, self.ends, strict=True):
            begin = end - len(some)
            if begin < stop and start < end:
                rows += some[max(start - begin, 0) : stop - begin]
        return rows


STORED_ROWS = (ArrowRows, HeldRows, JoinedRows)
"""Rows that have a digest, so that their tokens can stay on disk."""


def common_columns(rows: Sequence[Row]) -> set[str]:
    """Return the columns that every row has."""
    if isinstance(rows, STORED_ROWS):
        return rows.columns
    found = set(rows[0])
    for row in rows:
        found &= row.keys()
    return found


def locate_part(ends: Sequence[int], row: int) -> tuple[int, int]:
    """Return in which of several parts a row stands, and where in it.

    Args:
        ends: the number of rows up to the end of each part.
        row: counted from 0 over all parts.
    """
    part = bisect.bisect_right(ends, row)
    return part, row - (ends[part - 1] if part else 0)
