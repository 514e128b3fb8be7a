"""Imports the reward function of a dotted path, and checks that it can be called."""

import functools
import importlib
import inspect
import sys
from collections.abc import Iterator
from operator import attrgetter
from types import FunctionType, ModuleType

from rlightning.errors import ConfigError, did_you_mean
from rlightning.foreign_text import cut_line
from rlightning.rewards.calls import RewardCallable


def import_function(path: str) -> object:
    """Import the object of a dotted path: a function in a module, or an attribute of a class or object in one.

    Raises:
        ConfigError: there is no such module or attribute.
    """
    if "." not in path:
        raise ConfigError(
            f"The reward '{path}' is no dotted path. Write module.function, such as rlightning.rewards.{path}."
        )
    module, names = import_longest(path)
    if len(names) > 1 and not hasattr(module, names[0]):
        known = [name for name in vars(module) if not name.startswith("_")]
        raise ConfigError(
            f"The reward '{path}' cannot be imported: No module named '{module.__name__}.{names[0]}', and no class. "
            f"{did_you_mean(names[0], known)}"
        )
    found: object = module
    for name in names:
        if not hasattr(found, name):
            known = [n for n in vars(found).get("__all__") or vars(found) if not n.startswith("_")]
            owner = found.__name__ if hasattr(found, "__name__") else type(found).__name__
            raise ConfigError(f"'{owner}' has no reward function '{name}'. {did_you_mean(name, known)}")
        found = getattr(found, name)
    return found


def import_longest(path: str) -> tuple[ModuleType, list[str]]:
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
        except ImportError as error:
            if length > 1 and isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
                continue  # the last name may be of a class
            raise ConfigError(
                f"The reward '{path}' cannot be imported: {cut_line(error)}. Is its folder on PYTHONPATH?"
            ) from error
        except SyntaxError as error:
            raise ConfigError(f"The reward '{path}' cannot be imported: {cut_line(error)}. Fix its module.") from error
    raise AssertionError("the first name has been imported or refused")


def check_kind(function: object, name: str) -> RewardCallable:
    """Return an object that can be a reward function.

    Raises:
        ConfigError: it is not callable, a class, a method without its object, or a generator.
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
    """Return whether calling a function in the end runs an ``async def``."""
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
