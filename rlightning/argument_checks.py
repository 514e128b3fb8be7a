"""Checks what an object is built with from Python as the parser checks YAML: by the names and types of its class."""

import inspect
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache, wraps
from typing import Any, Literal, Self, TypeVar, get_args, get_origin

from rlightning.config_types import flatten_union, is_container, is_sequence, item_hints
from rlightning.errors import ConfigError, did_you_mean
from rlightning.foreign_text import cut_value
from rlightning.peer_names import suggest_name

_RULE = "Input should be "


class CheckedArguments:
    """Base of classes whose arguments are checked before ``__init__`` runs."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Raise a ConfigError for an argument whose name or type the class does not have."""
        check_arguments(cls, args, kwargs)
        return super().__new__(cls)


Kind = TypeVar("Kind", bound=type)


def checked(kind: Kind) -> Kind:
    """Have a dataclass check what it is built with, as :class:`CheckedArguments`, which would make it another class's.

    jsonargparse takes only what has no other bases for a dataclass.
    """
    init = kind.__init__  # type: ignore[misc]

    @wraps(init)
    def check_and_init(self: Any, *args: Any, **kwargs: Any) -> None:
        check_arguments(kind, args, kwargs)
        init(self, *args, **kwargs)

    kind.__init__ = check_and_init  # type: ignore[misc]
    return kind


def check_arguments(kind: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that a class does not take; those that are missing are left to Python.

    Args:
        kind: the class.
        args: given by position.
        kwargs: given by name.

    Raises:
        ConfigError: names the argument, its value, what it should be, and the nearest that is.
    """
    if not args and not kwargs:
        return
    hints = _hints_of(kind)
    given = dict(zip(_positional_names(kind), args, strict=False)) | dict(kwargs)
    for name, value in given.items():
        if name in hints:
            check_value(kind.__name__, name, value, hints[name])
        elif not _is_taken_otherwise(kind, name):
            raise ConfigError(f"{kind.__name__} has no argument '{name}'. {suggest_name(name, hints)}")


def check_value(kind: str, name: str, value: object, hint: Any) -> None:
    """Refuse a value that is not of a type hint. Numbers are what they are: neither 4.0 nor "4" is an int.

    Args:
        kind: the class that it is given to, by its name.
        name: of the argument.
        value: it may be a list where a tuple is meant, as in YAML, a NumPy number, or a path where a text is meant.
        hint: of the type; everything passes one that is missing, or that pydantic does not know.

    Raises:
        ConfigError: the value is of another type.
    """
    reasons = _find_reasons(value, hint)
    if reasons:
        given = f"{kind}({name}={cut_value(value)})"
        raise ConfigError(f"{given}: {_describe(reasons)}. {_way_out(value, hint)}".rstrip())


def _find_reasons(value: object, hint: Any) -> list[str]:
    """Pydantic's messages about a value; none if it is of the type."""
    import pydantic  # a tenth of a second

    adapter = _adapter(hint)
    reasons: list[str] = []
    for candidate in _spellings(value) if adapter else ():
        try:
            adapter.validate_python((candidate,))
            return []
        except pydantic.ValidationError as error:
            details = error.errors(include_url=False, include_context=False, include_input=False)
            reasons = reasons or [detail["msg"] for detail in details]
    return reasons


def _spellings(value: object) -> Iterator[object]:
    """A value, and what else Python code writes for it."""
    import numpy as np

    yield value.item() if isinstance(value, np.generic) else value
    if isinstance(value, list):
        yield tuple(value)
    elif isinstance(value, os.PathLike):
        yield os.fspath(value)


def _describe(reasons: list[str]) -> str:
    """One rule of several: that of a union has one for each of its types."""
    rules = [reason.removeprefix(_RULE) for reason in reasons if reason.startswith(_RULE)]
    return f"it should be {' or '.join(dict.fromkeys(rules))}" if rules else reasons[0]


@cache
def _hints_of(kind: type) -> dict[str, Any]:
    from rlightning.config_keys import parameters_of

    return parameters_of(kind)


@cache
def _adapter(hint: Any) -> Any:
    """What checks a value of a type hint, as the one item of a tuple: a dataclass alone would take no settings."""
    import pydantic

    if hint in (None, inspect.Parameter.empty):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            adapter = pydantic.TypeAdapter(tuple[hint], config={"strict": True, "arbitrary_types_allowed": True})
            return adapter if adapter.pydantic_complete else None
        except (pydantic.PydanticUserError, pydantic.PydanticUndefinedAnnotation, Warning):  # it is no type
            return None


def _positional_names(kind: type) -> list[str]:
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]  # type: ignore[misc]
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _is_taken_otherwise(kind: type, name: str) -> bool:
    """Whether an ``__init__`` with ``**kwargs`` may take an argument that is not among the class's parameters."""
    for base in kind.__mro__:
        function = vars(base).get("__init__")
        if not inspect.isfunction(function):
            continue
        parameters = inspect.signature(function).parameters
        if name in inspect.unwrap(function).__code__.co_consts:  # as in kwargs.pop(name)
            return True
        if all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
            return False
    return False


def _way_out(value: object, hint: Any) -> str:
    """A sentence about what to write instead, where that is known."""
    for number in _near_numbers(value):
        if not _find_reasons(number, hint):
            return f"Write {number}{', without quotes' if isinstance(value, str) else ''}."
    options = list(flatten_union(hint))
    items = [item for option in options if is_container(option) for item in item_hints(option)]
    if any(not _find_reasons(value, item) for option in options if is_sequence(option) for item in item_hints(option)):
        return f"Write [{cut_value(value)}]."
    words = [w for option in options if get_origin(option) is Literal for w in get_args(option) if isinstance(w, str)]
    if isinstance(value, str) and len(words) > 1:
        return did_you_mean(value, words)
    if hasattr(value, "save_pretrained"):
        return "Give its name or its folder; save_pretrained(folder) writes one."
    has_mapping = isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(v, Mapping) for v in value))
    kinds: list[Any] = [kind for option in (*options, *items) for kind in flatten_union(option) if is_dataclass(kind)]
    return f"Write {kinds[0].__name__}(...)." if has_mapping and kinds else ""


def _near_numbers(value: object) -> Iterator[int | float]:
    """What may have been meant by a value of the wrong type."""
    if isinstance(value, str):
        for kind in (int, float):
            with suppress(ValueError):
                yield kind(value)
    if isinstance(value, float) and value.is_integer():
        yield int(value)
