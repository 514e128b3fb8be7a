"""Python's own values in place of what NumPy and torch have for numbers, and those that a dataclass holds."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")


def to_number(value: object) -> Any:
    """Return the number of a NumPy number, or of an array or a tensor without dimensions; all else as it is."""
    if isinstance(value, type) or not hasattr(value, "ndim") or not hasattr(value, "item"):
        return value
    return value.item() if value.ndim == 0 else value


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


def _to_list(value: object) -> object:
    if isinstance(value, type) or not hasattr(value, "tolist"):
        return value
    return value.tolist() if callable(value.tolist) else value


def field_values(record: "DataclassInstance") -> dict[str, Any]:
    """Return the values of a dataclass's fields by name, as they are; not those that are unset."""
    return {field.name: getattr(record, field.name) for field in fields(record) if hasattr(record, field.name)}


def module_name(thing: object) -> str:
    """Return the name of the module of a class, a function or an object's class; "" where none is known."""
    name = getattr(thing, "__module__", None)
    return name if isinstance(name, str) else ""
