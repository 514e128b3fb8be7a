"""The base class of records with arrays, for Python 3.10 without other packages, as in environment workers."""

from __future__ import annotations


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
