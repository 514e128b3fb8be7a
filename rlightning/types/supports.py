"""Supports of truncated sampling: for each token of a sample, the tokens that top-k or top-p left to choose from.

Workers of environments import this file in other interpreters: Python 3.10 and the standard library, nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable


class Supports:
    """For each token of a sample, the ids of the tokens that it was drawn from.

    Args:
        token_ids: int32, or their bytes, the tokens of each support, one support after the other.
        sizes: [C] int32, of each support; 0: it has too many tokens, and the trainer's distribution is not truncated.
    """

    __slots__ = ("sizes", "token_ids")

    def __init__(self, token_ids: Iterable[int] | bytes, sizes: Iterable[int] | bytes) -> None:
        self.token_ids: array[int] = array("i", token_ids)
        self.sizes: array[int] = array("i", sizes)

    def __eq__(self, other: object) -> bool:
        """Return whether all supports are equal, and in the same order."""
        return isinstance(other, Supports) and (self.token_ids, self.sizes) == (other.token_ids, other.sizes)

    __hash__ = None  # type: ignore[assignment]  # as of any record that can change

    def __repr__(self) -> str:
        """Return a text with all supports."""
        return f"Supports({self.token_ids!r}, {self.sizes!r})"

    def to_plain(self) -> list[bytes]:
        """Return them in plain types, from which the class makes them again."""
        return [self.token_ids.tobytes(), self.sizes.tobytes()]
