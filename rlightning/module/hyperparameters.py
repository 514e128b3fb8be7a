"""A module's arguments as plain values in a checkpoint, from which ``load_from_checkpoint`` constructs the module.

A dataclass, such as a :class:`~rlightning.rewards.RewardFunction`, becomes a mapping of ``class_path`` and
``init_args``, as in YAML; a reward function its dotted path; a secret a reference to an environment variable.
"""

import inspect
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from pydoc import locate
from typing import TypeVar

import numpy as np

from rlightning.config.argument_checks import accepts, hints_of, is_taken_otherwise, positional_names
from rlightning.config.secret_arguments import conceal, mask_secrets, resolve_secrets
from rlightning.errors import ConfigError
from rlightning.python_values import field_values, module_name, to_number, to_python
from rlightning.rewards import RewardFunction

Module = TypeVar("Module")


class _NotPlainError(Exception):
    """An object cannot be expressed as plain values."""


def bind_arguments(cls: type, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments of a constructor call, positional and keyword, by parameter name."""
    signature = inspect.signature(cls.__init__)  # type: ignore[misc]
    bound = signature.bind_partial(None, *args, **kwargs)
    arguments: dict[str, object] = {}
    for name, value in list(bound.arguments.items())[1:]:
        match signature.parameters[name].kind:
            case inspect.Parameter.VAR_KEYWORD:
                arguments |= value
            case inspect.Parameter.VAR_POSITIONAL:
                others = [other for other in positional_names(cls) if other not in arguments]
                arguments |= dict(zip(others, value, strict=False))
            case _:
                arguments[name] = value
    return arguments


def to_plain(arguments: Mapping[str, object]) -> dict[str, object]:
    """Return arguments as plain values (numbers, texts, lists, dictionaries) for a checkpoint, without secrets and
    without objects that have no plain form.
    """
    values: dict[str, object] = {}
    for name, value in arguments.items():
        with suppress(_NotPlainError):
            values[name] = _plain(_named(value) if name == "rewards" else value)
    return conceal(mask_secrets(values)[0])


def make_module(cls: type[Module], values: Mapping[str, object], given: Mapping[str, object], where: str) -> Module:
    """Construct a module from the plain arguments that :func:`to_plain` returned.

    Args:
        cls: the module's class.
        values: arguments in a checkpoint, by name.
        given: arguments that replace those of ``values``.
        where: name of the checkpoint, for errors.

    Raises:
        ConfigError: an argument is missing, a secret is not in the environment, or a class cannot be found.
    """
    kept = {name: value for name, value in values.items() if name not in given and accepts(cls, name)}
    arguments = {name: _restore(value) for name, value in resolve_secrets(kept, where).items()} | dict(given)
    missing = [name for name in _required(cls) if name not in arguments]
    if missing:
        raise ConfigError(
            f"{where} does not hold {', '.join(missing)} of {cls.__name__}. Give what is missing, as "
            f"{cls.__name__}.load_from_checkpoint(..., {missing[0]}=...)."
        )
    return cls(**arguments)


def _required(cls: type) -> list[str]:
    """Return the required parameters of a class, and of the bases to which it passes its ``**kwargs``."""
    own = _parameters(cls)
    defaults = {name: default for kind in reversed(cls.__mro__) for name, default in _parameters(kind).items()}
    names = [name for name in hints_of(cls) or own if defaults.get(name) is inspect.Parameter.empty]
    return [name for name in names if name in own or not is_taken_otherwise(cls, name)]


def _parameters(kind: type) -> dict[str, object]:
    """Return the named parameters of a class's own ``__init__``, with their defaults."""
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]  # type: ignore[misc]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name: parameter.default for parameter in parameters if parameter.kind in named}


def _plain(value: object) -> object:
    value = to_number(value)
    if isinstance(value, range) or (isinstance(value, np.ndarray) and value.ndim == 1):
        value = to_python(list(value))
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if type(value) is list:
        return [_plain(one) for one in value]
    if type(value) is tuple:
        return tuple(map(_plain, value))
    if is_dataclass(value) and not isinstance(value, type):
        given = field_values(value)
        settings = {field.name: _plain(given[field.name]) for field in fields(value) if field.init}
        return {"class_path": _dotted_path(type(value)), "init_args": settings}
    raise _NotPlainError


def _named(reward: object) -> object:
    """Return a reward, or a list of rewards, with each function replaced by its dotted path."""
    if isinstance(reward, list | tuple):
        return [_named(one) for one in reward]
    if isinstance(reward, RewardFunction):
        return replace(reward, function=_dotted_path(reward.function)) if callable(reward.function) else reward
    return _dotted_path(reward) if callable(reward) else reward


def _dotted_path(thing: object) -> str:
    """Return the path by which another process can import a class or function."""
    module, name = module_name(thing), thing.__qualname__ if hasattr(thing, "__qualname__") else ""
    try:
        is_found = module != "__main__" and attrgetter(name)(sys.modules[module]) is thing
    except (AttributeError, KeyError, TypeError):
        is_found = False
    if not is_found:
        raise _NotPlainError
    return f"{module}.{name}"


def _restore(value: object) -> object:
    if isinstance(value, dict) and value.keys() == {"class_path", "init_args"}:
        kind = locate(value["class_path"])
        if not (isinstance(kind, type) and is_dataclass(kind)):
            raise ConfigError(f"The checkpoint names {value['class_path']}, which is no dataclass that can be found.")
        return kind(**{name: _restore(inner) for name, inner in value["init_args"].items()})
    if isinstance(value, dict):
        return {name: _restore(inner) for name, inner in value.items()}
    if type(value) is list:
        return [_restore(one) for one in value]
    return tuple(map(_restore, value)) if type(value) is tuple else value
