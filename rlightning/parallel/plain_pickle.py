"""Plain values of a file that ``torch.save`` has written, without calling anything that it names."""

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any


class Inert(dict[Any, Any]):
    """Stands for any class, function or object in a pickle; takes what it is given, and keeps entries alone."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __call__(self, *_: Any, **__: Any) -> "Inert":
        """What calling it, or making an object of it, gives."""
        return Inert()

    def __setstate__(self, state: Any) -> None:
        """Leave out an object's attributes."""

    def append(self, item: Any) -> None:
        """Leave out an item of a list."""

    def extend(self, items: Any) -> None:
        """Leave out items of a list."""

    def add(self, item: Any) -> None:
        """Leave out an item of a set."""

    __hash__ = object.__hash__  # type: ignore[assignment]


class PlainUnpickler(pickle.Unpickler):
    """Makes numbers, texts, lists, tuples and dictionaries; of all else, :class:`Inert` objects."""

    def find_class(self, module: str, name: str) -> Any:
        """No class is imported."""
        return Inert

    def persistent_load(self, key: Any) -> Any:
        """No tensor is read."""
        return Inert()


def read_plain(path: Path) -> Any:
    """Return the plain values of a file; tensors and other objects are :class:`Inert`.

    Raises:
        zipfile.BadZipFile: it is no file of ``torch.save``, or its pickle is not what was written, by its CRC-32.
        pickle.UnpicklingError: it cannot be read.
    """
    with zipfile.ZipFile(path) as file:
        name = next((name for name in file.namelist() if name.endswith("/data.pkl")), None)
        if name is None:
            raise zipfile.BadZipFile("it has no data.pkl")
        return PlainUnpickler(io.BytesIO(file.read(name))).load()
