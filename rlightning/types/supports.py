"""Records with arrays, and the supports of truncated sampling: the tokens that top-p, top-k and min-p left to sample.

Workers of environments import this file in other interpreters: it needs only Python 3.10 and the standard library.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable


class Buffers:
    """Base class of records with arrays; no tuple, list or dataclass, so that Lightning does not traverse them."""

    __slots__: tuple[str, ...] = ()

    def attributes(self) -> dict[str, object]:
        """Return the values of all ``__slots__``, also those of base classes, by name."""
        names = [name for kind in type(self).__mro__ for name in vars(kind).get("__slots__", ())]
        return {name: getattr(self, name) for name in names}

    def __eq__(self, other: object) -> bool:
        """Return whether all attributes are equal."""
        return isinstance(other, Buffers) and type(other) is type(self) and self.attributes() == other.attributes()

    __hash__ = None  # type: ignore[assignment]  # as of any record that can change

    def __repr__(self) -> str:
        """Return a text with all attributes."""
        values = ", ".join(f"{name}={value!r}" for name, value in self.attributes().items())
        return f"{type(self).__name__}({values})"


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
