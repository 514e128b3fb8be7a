"""Python's own values in place of what NumPy and torch have for numbers, alone and in lists, tuples and mappings."""

from argparse import Namespace
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def to_number(value: Any) -> Any:
    """Return the number of a NumPy number, or of an array or a tensor without dimensions; all else as it is."""
    has_number = not isinstance(value, type) and getattr(value, "ndim", None) == 0 and hasattr(value, "item")
    return value.item() if has_number else value


def to_python(value: T) -> T:
    """Return numbers and lists in place of NumPy's numbers and of arrays and tensors; all else as it is."""
    return map_items(_to_list, value)


def map_items(convert: Callable[[Any], object], value: T) -> T:
    """Apply a function to a value, or to the items of lists, tuples, mappings and namespaces at any depth.

    Containers stay what they are, and so, for a type checker, do the values in them.
    """
    given: Any = value
    changed: Any = None
    if type(value) in (list, tuple):
        changed = type(given)(map_items(convert, item) for item in given)
    elif type(value) is dict:
        changed = {name: map_items(convert, item) for name, item in given.items()}
    elif isinstance(value, Namespace):
        changed = type(value)(**{name: map_items(convert, item) for name, item in vars(value).items()})
    else:
        changed = convert(value)
    return changed  # type: ignore[no-any-return]


def _to_list(value: Any) -> Any:
    has_list = not isinstance(value, type) and callable(getattr(value, "tolist", None))
    return value.tolist() if has_list else value
