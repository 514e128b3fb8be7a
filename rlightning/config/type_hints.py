"""Properties of a configuration key's type hint: whether it accepts text, a class, or several items."""

import inspect
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

Parameters = dict[str, object]
"""Type hints of parameters by name; a group of keys has its own parameters in place of a type hint."""

PLAIN_MODULES = ("builtins", "collections", "datetime", "jsonargparse", "os", "pathlib", "typing")
"""Modules of types whose values are converted from one value, rather than constructed from arguments."""


def flatten_union(hint: object) -> Iterator[object]:
    """Yield the alternatives of a type hint, without their annotations."""
    if get_origin(hint) is Annotated:
        yield from flatten_union(get_args(hint)[0])
    elif get_origin(hint) in (Union, types.UnionType):
        for option in get_args(hint):
            yield from flatten_union(option)
    else:
        yield hint


def takes_text(hint: object) -> bool:
    """Return whether a type hint accepts a string, alone or as an item of a container at any depth.

    A key of such a type accepts the name of an existing file, and is not replaced by the file's content.
    """
    return any(
        is_text(option) or (is_container(option) and any(takes_text(item) for item in item_hints(option)))
        for option in flatten_union(hint)
    )


def is_text(hint: object) -> bool:
    """Return whether a type hint, not a union, is a string, path or enum type, or a Literal with a string."""
    if get_origin(hint) is Literal:
        return any(isinstance(word, str) for word in get_args(hint))
    return inspect.isclass(hint) and issubclass(hint, str | os.PathLike | Enum)


def is_configurable(hint: object) -> TypeGuard[type]:
    """Return whether a type hint is a class whose arguments a configuration can give."""
    if not inspect.isclass(hint) or issubclass(hint, Enum) or hint.__module__ == "torch":
        return False
    return hint.__module__.partition(".")[0] not in PLAIN_MODULES


def is_callable(hint: object) -> bool:
    """Return whether a type hint is a function type, for which any callable object may be given."""
    return get_origin(hint) is Callable


def is_sequence(hint: object) -> bool:
    """Return whether a type hint is a sequence."""
    return is_container(hint) and not is_mapping(hint)


def is_mapping(hint: object) -> bool:
    """Return whether a type hint is a mapping."""
    origin = get_origin(hint)
    return inspect.isclass(origin) and issubclass(origin, Mapping)


def is_container(hint: object) -> bool:
    """Return whether a type hint is a sequence or a mapping."""
    origin = get_origin(hint)
    return inspect.isclass(origin) and issubclass(origin, Iterable)


def item_hints(hint: object) -> list[object]:
    """Return the type hints of a container's items; for a mapping, only those of its values."""
    hints = [item for item in get_args(hint) if item is not Ellipsis]
    return hints[1:] if is_mapping(hint) else hints


def takes_null(options: Iterable[object]) -> bool:
    """Return whether a value may be None: if one of its type hint's alternatives is None, Any, object, or missing."""
    return any(option in (None, type(None), Any, object, inspect.Parameter.empty) for option in options)
