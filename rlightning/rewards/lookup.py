"""Imports the reward function of a dotted path, and checks that it can be called."""

import inspect
import sys
from operator import attrgetter
from types import FunctionType

from rlightning.callables import unwrap
from rlightning.dotted_path import import_object
from rlightning.errors import ConfigError
from rlightning.rewards.calls import RewardCallable


def import_function(path: str) -> object:
    """Import the object of a reward's dotted path; raises a ConfigError if it does not exist."""
    return import_object(path, f"The reward '{path}'", "rlightning.rewards")


def check_kind(function: object, name: str) -> RewardCallable:
    """Return ``function`` if it can be called as a reward function; else raise a ConfigError that calls it ``name``.

    Raises:
        ConfigError: the object is not callable, or is a class, a method without its object, or a generator.
    """
    inner = unwrap(function)
    if not callable(function):
        raise ConfigError(f"The reward '{name}' is a {type(function).__name__}, not a function. Name a function.")
    if inspect.isclass(inner):
        raise ConfigError(
            f"The reward '{name}' is a class: a call would make an object of it, not a number. Make the object in its "
            f"module, as in judge = {inner.__name__}(), and name that one."
        )
    if isinstance(inner, FunctionType) and (owner := _class_of(inner)) is not None:
        raise ConfigError(
            f"The reward '{name}' is a method of the class {owner.__name__} without an object. Make one in its module, "
            f"as in judge = {owner.__name__}(), and name judge.{inner.__name__}; or make it a staticmethod."
        )
    called = inner if inspect.isroutine(inner) else type(inner).__call__
    if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        raise ConfigError(f"The reward '{name}' is a generator: it yields, and has to return a number.")
    return function


def _class_of(function: FunctionType) -> type | None:
    """Return the class to which a method with a ``self`` parameter belongs."""
    path, _, name = function.__qualname__.rpartition(".")
    try:
        owner = attrgetter(path)(sys.modules[function.__module__])
    except (AttributeError, KeyError):
        return None
    is_method = inspect.isclass(owner) and inspect.getattr_static(owner, name, None) is function
    return owner if is_method and function.__code__.co_varnames[:1] == ("self",) else None
