"""Imports the object that a dotted path in a configuration names."""

from __future__ import annotations

import importlib
import sys

from rlightning.errors import ConfigError, did_you_mean
from rlightning.foreign_text import describe_error


def name_object(given: object) -> str:
    """Return an object's name for messages: of a dotted path the path, of a class or function its name."""
    return given if isinstance(given, str) else getattr(given, "__qualname__", str(given))


def import_object(path: object, what: str) -> object:
    """Import the class or function that a dotted path names; other objects are returned unchanged.

    Raises a ConfigError that names ``what``, the key and its value, if the import fails.
    """
    if not isinstance(path, str):
        return path
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise ConfigError(f"{what} is no dotted path. Write module.Class, such as my_package.{path}.")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing the module may raise anything
        raise ConfigError(
            f"{what} cannot be imported by {sys.executable}: {describe_error(error)}. Install it there, or put its "
            "folder on PYTHONPATH."
        ) from error
    found: object = getattr(module, name, None)
    if found is None:
        known = [name for name in vars(module) if not name.startswith("_")]
        raise ConfigError(f"{what}: '{module_name}' has no class or function '{name}'. {did_you_mean(name, known)}")
    return found
