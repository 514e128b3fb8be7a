"""Reward functions as what is sent to worker processes, and the modules that these import for them."""

import io
import pickle
from typing import Any, NamedTuple

from rlightning.rewards.lookup import import_function


class Pickled(NamedTuple):
    """A pickled function.

    Attributes:
        data: None where it cannot go to another process.
        modules: the names of those whose functions, classes and objects it is made of.
    """

    data: bytes | None
    modules: frozenset[str]


class _Named:
    """Stands for what a dotted path names; unpickling imports that."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return import_function, (self.path,)


def pickle_named(path: str) -> bytes:
    """Pickle what a dotted path names, whatever it is: an object with a lock or a client too."""
    return pickle.dumps(_Named(path))


def pickle_function(function: Any) -> Pickled:
    """Pickle a function, or its arguments; where that is impossible, name the modules that were met before."""
    file = io.BytesIO()
    pickler = _ModulePickler(file)
    try:
        pickler.dump(function)
    except Exception:  # an object's own __reduce__ may raise anything
        return Pickled(None, frozenset(pickler.modules))
    # A worker has another __main__, and running the user's script again to get at it could do anything.
    data = None if "__main__" in pickler.modules else file.getvalue()
    return Pickled(data, frozenset(pickler.modules))


class _ModulePickler(pickle.Pickler):
    """Notes the module of each function, class and object that it pickles."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.modules: set[str] = set()

    def reducer_override(self, value: Any) -> Any:
        """See pickle.Pickler: called for what is no plain value; this leaves the work to pickle."""
        module = getattr(value, "__module__", None)
        if isinstance(module, str):
            self.modules.add(module)
        return NotImplemented
