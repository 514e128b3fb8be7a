"""Checks the names and types of arguments of objects constructed in Python, as the parser does for YAML."""

import difflib
import inspect
import os
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from enum import Enum
from functools import cache, wraps
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentParser

from rlightning.config.jsonargparse_internals import hint_of, parser_actions
from rlightning.config.peer_names import PEER_NAMES, suggest_name
from rlightning.config.type_hints import Parameters, flatten_union, is_callable, is_container, is_sequence, item_hints
from rlightning.errors import ConfigError, did_you_mean
from rlightning.foreign_text import cut_value
from rlightning.python_values import map_items, module_name, to_number, to_python

if TYPE_CHECKING:
    from pydantic_core import SchemaValidator

_RULE = "Input should be "
_WORDS = {"an instance of Sequence": "a list", "a valid string": "a text", "callable": "a function"}
_RELAXED = ("tuple", "list", "enum", "lax-or-strict")  # the last is a path
_PACKAGES = ("rlightning", "lightning")  # packages whose classes take only the arguments in their signatures
_NEAR = 0.85  # difflib ratio from which a name counts as misspelled


class CheckedArguments:
    """Base of classes that raise a ConfigError for wrong names or types of arguments, before ``__init__`` runs."""

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Raise a ConfigError for an argument with an unknown name or a wrong type."""
        check_arguments(cls, args, kwargs)
        return super().__new__(cls)


Kind = TypeVar("Kind", bound=type)


def checked(kind: Kind) -> Kind:
    """Class decorator that makes a dataclass check its arguments as :class:`CheckedArguments` does.

    jsonargparse treats only classes without other bases as dataclasses.
    """
    init = kind.__init__  # type: ignore[misc]

    @wraps(init)
    def check_and_init(self: object, *args: object, **kwargs: object) -> None:
        check_arguments(kind, args, kwargs)
        init(self, *args, **kwargs)

    kind.__init__ = check_and_init  # type: ignore[misc]
    return kind


def check_arguments(kind: type, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    """Raise a ConfigError if a class does not accept these arguments; missing arguments are left to Python.

    Args:
        kind: the class.
        args: given by position.
        kwargs: given by name.

    Raises:
        ConfigError: names the argument, its value, the expected type or name, and the nearest known name.
    """
    if not args and not kwargs:
        return
    hints = hints_of(kind)
    if hints is None:
        return
    names = _own_positional_names(kind.__init__)  # type: ignore[misc]
    if len(args) > len(names) and not _has(kind.__init__, inspect.Parameter.VAR_POSITIONAL):  # type: ignore[misc]
        fitting = (n for n, hint in hints.items() if n not in {*names, *kwargs} and _fits(args[len(names)], hint))
        raise ConfigError(_too_many(kind, len(names), args, next(fitting, None)))
    for name, value in (dict(zip(names, args, strict=False)) | dict(kwargs)).items():
        if name in hints:
            check_value(kind.__name__, name, value, hints[name])
        elif not accepts(kind, name):
            raise ConfigError(f"{kind.__name__} has no argument '{name}'. {suggest_name(name, hints)}")


def accepts(kind: type, name: str) -> bool:
    """Return whether a class accepts an argument; with ``**kwargs`` any name, except likely misspellings."""
    hints = hints_of(kind)
    if hints is None or name in hints or is_taken_otherwise(kind, name):
        return True
    init = kind.__init__  # type: ignore[misc]
    is_ours = module_name(init).partition(".")[0] in _PACKAGES
    return not is_ours and _has(init, inspect.Parameter.VAR_KEYWORD) and not _is_mistaken(name, hints)


@cache
def hints_of(kind: type) -> dict[str, object] | None:
    """Return the type hints of a class's arguments by name; None if they cannot be determined."""
    try:
        parameters = parameters_of(kind)
    except Exception:  # the user's class cannot be inspected, but may still be created
        return None
    # A group of keys stands for an object.
    return {name: _annotation(kind, name) if isinstance(hint, dict) else hint for name, hint in parameters.items()}


def parameters_of(source: type | ArgumentParser) -> Parameters:
    """Return the type hints, by name, of a class's arguments, also those passed by ``**kwargs``, or of a parser's."""
    return _parameters_of_parser(source) if isinstance(source, ArgumentParser) else _parameters_of_class(source)


@cache
def _parameters_of_class(kind: type) -> Parameters:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, fail_untyped=False, instantiate=False)
    return _parameters_of_parser(parser)


def _parameters_of_parser(parser: ArgumentParser) -> Parameters:
    tree: Parameters = {}
    for action in parser_actions(parser):
        *groups, name = action.dest.split(".")
        if name == "help":
            continue
        branch = tree
        for group in groups:
            known = branch.get(group)
            branch[group] = branch = known if isinstance(known, dict) else {}
        branch.setdefault(name, hint_of(action))
    return tree


def positional_names(kind: type) -> list[str]:
    """Return the names of a class's positional arguments, in order; those of its bases follow if it has ``*args``."""
    names: list[str] = []
    for init in _inits(kind):
        names += [name for name in _own_positional_names(init) if name not in names]
        if not _has(init, inspect.Parameter.VAR_POSITIONAL):
            break
    hints = hints_of(kind)  # leaves out arguments that the class itself passes to its bases
    return [name for name in names if hints is None or name in hints]


def is_taken_otherwise(kind: type, name: str) -> bool:
    """Return whether an ``__init__`` with ``**kwargs`` reads this name from them, as in ``kwargs.pop(name)``."""
    for init in _inits(kind):
        function = inspect.unwrap(init)
        if isinstance(function, FunctionType) and name in _constants(function.__code__):
            return True
        if not _has(init, inspect.Parameter.VAR_KEYWORD):
            return False
    return False


def check_value(kind: str, name: str, value: object, hint: object) -> None:
    """Raise a ConfigError if an argument's value is not of its type; neither 4.0 nor "4" is an int.

    Args:
        kind: the name of the class.
        name: name of the argument.
        value: also accepted are another kind of sequence, as in YAML, NumPy's and torch's values in place of numbers
            and lists, a path in place of a text, and vice versa.
        hint: the type hint; any value is accepted if it is missing, or unknown to pydantic.

    Raises:
        ConfigError: the value has another type.
    """
    reasons = _find_reasons(value, hint)
    if reasons:
        given = f"{kind}({name}={cut_value(value)})"
        raise ConfigError(f"{given}: {_describe(reasons)}. {_way_out(value, hint)}".rstrip())


def _find_reasons(value: object, hint: object) -> list[str]:
    """Return pydantic's messages about why a value does not have a type; empty if it does."""
    import pydantic  # a tenth of a second

    validator = _find_validator(hint)
    is_strict = True if isinstance(value, Iterator) else None  # a list of its items would leave it empty
    reasons: list[str] = []
    for candidate in _spellings(value):
        if validator is None:
            break
        try:
            validator.validate_python((candidate,), strict=is_strict)
            return []
        except pydantic.ValidationError as error:
            details = error.errors(include_url=False, include_context=False, include_input=False)
            reasons = reasons or [detail["msg"] for detail in details]
    return reasons


def _fits(value: object, hint: object) -> bool:
    """Return whether a value certainly has a type."""
    return _find_validator(hint) is not None and not _find_reasons(value, hint)


def _spellings(value: object) -> Iterator[object]:
    """Yield a value, then the value with Python objects converted to their form in YAML."""
    yield value
    yield map_items(_spell_out, to_python(value))


def _spell_out(value: object) -> object:
    """Return the text of a path, or the value of an enumeration's member; other values unchanged."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.value if isinstance(value, Enum) and isinstance(value, str | int) else value


def _describe(reasons: list[str]) -> str:
    """Join pydantic's messages into one sentence; a union type has a message for each of its types."""
    rules = [reason.removeprefix(_RULE) for reason in reasons if reason.startswith(_RULE)]
    rules = [_WORDS.get(rule, rule) for rule in rules]
    return f"it should be {' or '.join(dict.fromkeys(rules))}" if rules else reasons[0]


def _find_validator(hint: object) -> "SchemaValidator | None":
    """Return a validator for a type hint wrapped in a 1-tuple: pydantic allows no settings for a bare dataclass."""
    if hint in (None, inspect.Parameter.empty):
        return None
    try:
        return _make_validator(hint)
    except Exception:  # the hint is not a type, or one that pydantic cannot check
        return None


@cache
def _make_validator(hint: Hashable) -> "SchemaValidator | None":
    import pydantic
    import pydantic_core

    config = pydantic.ConfigDict(strict=True, arbitrary_types_allowed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapter = pydantic.TypeAdapter(tuple[hint], config=config)  # type: ignore[valid-type]
    complete = adapter.pydantic_complete
    return pydantic_core.SchemaValidator(_relax(adapter.core_schema), {"strict": True}) if complete else None


def _relax(schema: object) -> Any:
    """Return pydantic's schema of a type, in which the types listed in _RELAXED also accept their other forms."""
    if isinstance(schema, list):
        return [_relax(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    relaxed = {key: _relax(part) for key, part in schema.items()}
    return relaxed | {"strict": False} if schema.get("type") in _RELAXED else relaxed


def _annotation(kind: type, name: str) -> object:
    """Return the annotation of an argument in the class's source; None if it cannot be found."""
    for init in _inits(kind):
        if name in inspect.signature(init).parameters:
            with suppress(NameError, AttributeError, TypeError):
                return get_type_hints(init).get(name)
            return None
    return None


def _inits(kind: type) -> Iterator[FunctionType]:
    """Yield the ``__init__`` of a class and of each of its bases."""
    yield from (init for base in kind.__mro__ if inspect.isfunction(init := vars(base).get("__init__")))


def _own_positional_names(init: Callable[..., object]) -> list[str]:
    parameters = list(inspect.signature(init).parameters.values())[1:]
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _has(init: Callable[..., object], kind: object) -> bool:
    """Return whether an ``__init__`` has a parameter of this :class:`inspect.Parameter` kind, such as ``**kwargs``."""
    return any(parameter.kind is kind for parameter in inspect.signature(init).parameters.values())


def _constants(code: CodeType) -> Iterator[object]:
    """Yield the constants in a function's code, including those of its inner functions."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _constants(constant)
        else:
            yield constant


def _is_mistaken(name: str, known: Iterable[str]) -> bool:
    """Return whether an unknown name is another library's name for an argument, or a misspelling of a known one."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=_NEAR)
    is_made_of = any(name.endswith(f"_{one}") or name.startswith(f"{one}_") for one in near)
    return name in PEER_NAMES or (bool(near) and not is_made_of)


def _too_many(kind: type, number: int, args: tuple[object, ...], name: str | None) -> str:
    value = "[...]" if isinstance(args[number], list | tuple) else "..."
    way_out = f"Give the others by name{f', as {name}={value}' if name else ''}."
    takes = "1 argument" if number == 1 else f"{number or 'no'} arguments"
    return f"{kind.__name__} takes {takes} by position, not {len(args)}. {way_out}"


def _way_out(value: object, hint: object) -> str:
    """Return a sentence that says what to write instead; "" if unknown."""
    if value is None:
        return "Leave it out for its default."
    for number in _near_numbers(to_number(value)):
        if not _find_reasons(number, hint):
            return f"Write {number}{', without quotes' if isinstance(value, str) else ''}."
    options = list(flatten_union(hint))
    items = [item for option in options if is_container(option) for item in item_hints(option)]
    if any(not _find_reasons(value, item) for option in options if is_sequence(option) for item in item_hints(option)):
        return f"Write [{cut_value(value)}]."
    words = [w for option in options if get_origin(option) is Literal for w in get_args(option) if isinstance(w, str)]
    if isinstance(value, str) and len(words) > 1:
        return did_you_mean(value, words)
    if isinstance(value, ModuleType) and any(is_callable(option) for option in options):
        functions = [name for name, thing in vars(value).items() if inspect.isfunction(thing) and name[0] != "_"]
        return f"Give a function of it, such as {value.__name__}.{functions[0]}." if functions else "Give a function."
    if hasattr(value, "save_pretrained"):
        return "Give its name or its folder; save_pretrained(folder) writes one."
    has_mapping = isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(v, Mapping) for v in value))
    kinds = [kind for option in (*options, *items) for kind in flatten_union(option) if isinstance(kind, type)]
    name = next((kind.__name__ for kind in kinds if is_dataclass(kind)), None)
    return f"Write {name}(...)." if has_mapping and name else ""


def _near_numbers(value: object) -> Iterator[int | float]:
    """Yield the numbers that the user may have meant by a value of the wrong type."""
    if isinstance(value, str):
        for kind in (int, float):
            with suppress(ValueError):
                yield kind(value)
    if isinstance(value, float) and value.is_integer():
        yield int(value)
