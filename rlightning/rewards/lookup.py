"""Imports the reward function of a dotted path, and checks that it can be called."""

import functools
import inspect
import sys
from collections.abc import Iterator
from operator import attrgetter
from types import FunctionType

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


def layers(function: object) -> Iterator[object]:
    """Yield a function, and the functions inside a functools.partial, functools.wraps wrapper or callable object."""
    while True:
        yield function
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif callable(function) and not inspect.isroutine(function) and not inspect.isclass(function):
            function = type(function).__call__
        else:
            return


def unwrap(function: object) -> object:
    """Return the function or object inside nested functools.partial objects."""
    return next(layer for layer in layers(function) if not isinstance(layer, functools.partial))


def is_async(function: object) -> bool:
    """Return whether calling a function eventually runs an ``async def``."""
    return any(map(inspect.iscoroutinefunction, layers(function)))


def _class_of(function: FunctionType) -> type | None:
    """Return the class to which a method with a ``self`` parameter belongs."""
    path, _, name = function.__qualname__.rpartition(".")
    try:
        owner = attrgetter(path)(sys.modules[function.__module__])
    except (AttributeError, KeyError):
        return None
    is_method = inspect.isclass(owner) and inspect.getattr_static(owner, name, None) is function
    return owner if is_method and function.__code__.co_varnames[:1] == ("self",) else None
