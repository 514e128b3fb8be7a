"""Converts NumPy and torch numbers to Python's, and reads the fields of dataclasses."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any, ClassVar, Protocol, TypeVar

T = TypeVar("T")

JsonObject = dict[str, Any]
"""A JSON object, as ``json.loads`` returns it."""


class DataclassInstance(Protocol):
    """An instance of any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


def to_number(value: object) -> object:
    """Return a Python number for a NumPy number or a zero-dimensional array or tensor; other values unchanged."""
    if isinstance(value, type) or not hasattr(value, "ndim") or not hasattr(value, "item"):
        return value
    return value.item() if value.ndim == 0 else value


def to_python(value: T) -> T:
    """Return a value with NumPy numbers, arrays and tensors converted to Python numbers and lists; others unchanged."""
    return map_items(_to_list, value)


def map_items(convert: Callable[[object], object], value: T) -> T:
    """Apply a function to a value, or to the items of lists, tuples, mappings and namespaces at any depth.

    The types of containers stay the same; for a type checker, so do the types of values.
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


def _to_list(value: object) -> object:
    if isinstance(value, type) or not hasattr(value, "tolist"):
        return value
    return value.tolist() if callable(value.tolist) else value


def field_values(record: DataclassInstance) -> dict[str, Any]:
    """Return the values of a dataclass's fields by name, without copying; unset fields are left out."""
    return {field.name: getattr(record, field.name) for field in fields(record) if hasattr(record, field.name)}


def module_name(thing: object) -> str:
    """Return the name of the module that defines a class, a function or an object's class; "" if unknown."""
    name = getattr(thing, "__module__", None)
    return name if isinstance(name, str) else ""
