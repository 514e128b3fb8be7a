"""Supports of truncated sampling: for each token of a sample, the tokens that top-p, top-k and min-p left to sample.

Workers of environments import this file in other interpreters: it needs only Python 3.10 and the standard library.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from rlightning.types.buffers import Buffers


class Supports(Buffers):
    """For each token of a sample, the ids of the tokens from which it was drawn.

    Args:
        token_ids: int32 numbers, or their bytes: all supports, concatenated.
        sizes: [C] int32, number of tokens of each support; 0 for a support that is too large, for which the trainer
            does not truncate.
    """

    __slots__ = ("sizes", "token_ids")

    def __init__(self, token_ids: Iterable[int] | bytes, sizes: Iterable[int] | bytes) -> None:
        self.token_ids: array[int] = array("i", token_ids)
        self.sizes: array[int] = array("i", sizes)

    def to_plain(self) -> list[bytes]:
        """Return ``token_ids`` and ``sizes`` as bytes, from which an equal object can be created."""
        return [self.token_ids.tobytes(), self.sizes.tobytes()]
