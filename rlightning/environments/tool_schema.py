"""JSON schemas of tools, from type hints and docstrings of Python functions, and the validation of arguments.

The schemas are those of ``transformers.utils.get_json_schema``; environments' workers may lack transformers.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rlightning.environments.messages import Message
from rlightning.errors import ConfigError
from rlightning.foreign_text import cut_line, cut_value
from rlightning.python_values import JsonObject

Schema = JsonObject

SIMPLE = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
ARRAYS = ("list", "tuple", "set", "frozenset", "Sequence", "Iterable", "Collection")
OBJECTS = ("dict", "Mapping", "MutableMapping")
PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}
SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns?|Raises|Yields?|Examples?|Notes?|Attributes):\s*$")
ARGUMENT = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


def describe_tool(function: Callable[..., object], what: str) -> Message:
    """Return the JSON schema of a function in the format of chat APIs and chat templates.

    Raises a ConfigError if a docstring or type hint is missing, or JSON has no such type.
    """
    description, about = read_docstring(inspect.getdoc(function) or "")
    name = function.__name__
    if not description:
        raise ConfigError(f"{what}: '{name}' has no docstring. Write what it does, for the policy.")
    try:
        hints = get_type_hints(function)
    except Exception as error:  # a hint may be any expression
        raise ConfigError(f"{what}: the type hints of '{name}' cannot be read: {cut_line(error)}.") from error
    properties: dict[str, Schema] = {}
    required: list[str] = []
    for parameter in own_parameters(function):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"{what}: '{name}' has the parameter '{parameter}'. Give each argument a name.")
        if parameter.name not in hints:
            raise ConfigError(
                f"{what}: the parameter '{parameter.name}' of '{name}' has no type hint. Write one, such as "
                f"{parameter.name}: str."
            )
        schema = describe_type(hints[parameter.name], f"{what}: the parameter '{parameter.name}' of '{name}'")
        if parameter.name in about:
            schema["description"] = about[parameter.name]
        properties[parameter.name] = schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters: Schema = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def own_parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    """Return the parameters of a function, without the ``self`` of a method."""
    parameters = list(inspect.signature(function).parameters.values())
    is_method = (
        parameters and parameters[0].name in ("self", "cls") and parameters[0].annotation is inspect.Parameter.empty
    )
    return parameters[1:] if is_method else parameters


def describe_type(hint: object, what: str) -> Schema:
    """Return the JSON schema of a type hint; raises a ConfigError if JSON has no such type."""
    if hint is Any:
        return {}
    if hint in SIMPLE:
        return {"type": SIMPLE[hint]}
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin is Union or isinstance(hint, types.UnionType):
        others = [describe_type(one, what) for one in arguments if one is not type(None)]
        simple = [one["type"] for one in others if set(one) == {"type"}]
        if len(others) == 1:
            schema = others[0]
        elif len(simple) == len(others):
            schema = {"type": sorted(set(simple))}
        else:
            schema = {"anyOf": others}
        return {**schema, "nullable": True} if type(None) in arguments else schema
    if origin is Literal:
        kinds = sorted({SIMPLE[type(value)] for value in arguments if type(value) in SIMPLE})
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(arguments)}
    kind = origin.__name__ if isinstance(origin, type) else ""
    if kind in ARRAYS:
        items = [one for one in arguments if one is not ...]
        return {"type": "array", "items": describe_type(items[0], what)} if items else {"type": "array"}
    if kind in OBJECTS:
        values = {"additionalProperties": describe_type(arguments[1], what)} if len(arguments) == 2 else {}
        return {"type": "object", **values}
    raise ConfigError(
        f"{what} has the type {cut_value(hint)}, which JSON has not. Use str, int, float, bool, list, dict, Literal, "
        "or unions of these."
    )


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Parse a Google-style docstring to its description, and the descriptions of its arguments."""
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if SECTION.match(line)] + [len(lines)]
    description = "\n".join(lines[: starts[0]]).strip()
    about: dict[str, str] = {}
    for start, end in pairwise(starts):
        if lines[start].startswith(("Arg", "Param")):
            body = inspect.cleandoc("\n".join(["", *lines[start + 1 : end]])).splitlines()
            name = ""
            for line in body:
                found = None if line.startswith(" ") else ARGUMENT.match(line)
                if found:
                    name = found[1]
                    about[name] = found[2].strip()
                elif name and line.strip():
                    about[name] = f"{about[name]} {line.strip()}".strip()
    return description, about


def find_mistake(schema: Schema, value: object, name: str) -> str | None:
    """Return an error message for the policy if an argument's value does not fit its schema; None if it does."""
    if value is None and schema.get("nullable"):
        return None
    if "anyOf" in schema:
        mistakes = [find_mistake(one, value, name) for one in schema["anyOf"]]
        return mistakes[0] if all(mistakes) else None
    if "enum" in schema and value not in schema["enum"]:
        return f"{name} is {cut_value(value)}, and has to be one of {schema['enum']}."
    kinds = _kinds(schema)
    if kinds and not any(_is_of(value, kind) for kind in kinds):
        return f"{name} is {cut_value(value)}, and has to be of type {' or '.join(kinds)}."
    inner: Mapping[str, object] | None = None
    if isinstance(value, list) and "items" in schema:
        inner = {f"{name}[{i}]": item for i, item in enumerate(value)}
        part = schema["items"]
    elif isinstance(value, dict) and "additionalProperties" in schema:
        inner = {f"{name}[{key!r}]": item for key, item in value.items()}
        part = schema["additionalProperties"]
    if inner is None:
        return None
    return next((found for key, item in inner.items() if (found := find_mistake(part, item, key))), None)


def find_mistakes(schema: Schema, arguments: Mapping[str, object]) -> str | None:
    """Return an error message for the policy if the arguments of a call do not fit the schema; None if they do."""
    properties = schema["properties"]
    missing = [name for name in schema.get("required", []) if name not in arguments]
    unknown = [name for name in arguments if name not in properties]
    if missing:
        return f"The argument {missing[0]} is missing."
    if unknown:
        return f"There is no argument {cut_value(unknown[0])}: it takes {', '.join(properties) or 'none'}."
    found = (find_mistake(properties[name], value, name) for name, value in arguments.items())
    return next((mistake for mistake in found if mistake), None)


def convert_numbers(schema: Schema, arguments: Mapping[str, object]) -> JsonObject:
    """Return a call's arguments, in which floats such as 3.0 become ints where the schema has an integer."""
    return {name: _convert(schema["properties"][name], value) for name, value in arguments.items()}


def _convert(schema: Schema, value: object) -> object:
    if isinstance(value, list | dict) and "anyOf" in schema:
        schema = next((one for one in schema["anyOf"] if find_mistake(one, value, "") is None), {})
    if isinstance(value, list):
        return [_convert(schema.get("items", {}), item) for item in value]
    if isinstance(value, dict):
        return {key: _convert(schema.get("additionalProperties", {}), item) for key, item in value.items()}
    kinds = [kind for one in schema.get("anyOf", [schema]) for kind in _kinds(one)]
    return int(value) if isinstance(value, float) and "integer" in kinds and "number" not in kinds else value


def _kinds(schema: Schema) -> list[str]:
    kinds = schema.get("type", [])
    return [kinds] if isinstance(kinds, str) else kinds


def _is_of(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, PYTHON_TYPES[kind])
