"""Imports the object that a dotted path in a configuration names. Standard library only."""

from __future__ import annotations

import importlib
import sys
import traceback
from types import ModuleType

from rlightning.errors import ConfigError, did_you_mean
from rlightning.foreign_text import describe_error


def name_object(given: object) -> str:
    """Return an object's name for messages: a dotted path unchanged, else the name of the class or function."""
    if isinstance(given, str):
        return given
    return given.__qualname__ if hasattr(given, "__qualname__") else str(given)


def import_object(path: object, what: str, package: str = "my_package") -> object:
    """Import the object of a dotted path; return any ``path`` that is not a string unchanged.

    Args:
        path: dotted path of an object in a module, or of an attribute of such an object.
        what: the key and its value, for errors.
        package: example of a package, for the error about a path without a dot.

    Raises:
        ConfigError: there is no such module or attribute.
    """
    if not isinstance(path, str):
        return path
    if "." not in path or not all(path.split(".")):
        raise ConfigError(f"{what} is no dotted path. Write module.name, such as {package}.{path.strip('.')}.")
    found: object
    found, names = import_longest(path, what)
    while names:
        name, *names = names
        if not hasattr(found, name):
            exported = found.__all__ if hasattr(found, "__all__") and not names else dir(found)
            known = [one for one in exported if not one.startswith("_")]
            owner = found.__name__ if hasattr(found, "__name__") else type(found).__name__
            kinds = "module or class" if names else "class or function"
            raise ConfigError(f"{what}: '{owner}' has no {kinds} '{name}'. {did_you_mean(name, known)}")
        found = getattr(found, name)
    return found


def describe_import_error(error: Exception) -> str:
    """Return an import's exception as one line of text, with the file and line of the module that raised it."""
    modules = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name == "<module>"]
    if isinstance(error, ImportError | SyntaxError) or not modules:  # these two name the module or the line themselves
        return describe_error(error)
    return f"{describe_error(error)} ({modules[-1].filename}, line {modules[-1].lineno})"


def import_longest(path: str, what: str) -> tuple[ModuleType, list[str]]:
    """Import the longest prefix of a dotted path that is a module.

    Returns:
        The module, and the remaining names of the path.

    Raises:
        ConfigError: there is no such module, or it cannot be imported.
    """
    names = path.split(".")
    for length in range(len(names) - 1, 0, -1):
        module = ".".join(names[:length])
        try:
            return importlib.import_module(module), names[length:]
        except Exception as error:
            if length > 1 and isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
                continue  # the last name may be of a class
            is_missing = isinstance(error, ImportError)
            raise ConfigError(
                f"{what} cannot be imported by {sys.executable}: {describe_import_error(error)}. "
                f"{'Install it there, or put its folder on PYTHONPATH' if is_missing else 'Fix its module'}."
            ) from error
    raise AssertionError("the first name has been imported or refused")
