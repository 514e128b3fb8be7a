"""Summarizes jsonargparse's messages about refused values in one line."""

import re
from itertools import takewhile

from rlightning.cli.config_keys import ConfigKeys
from rlightning.errors import did_you_mean

KINDS = {"Sequence": "list", "Iterable": "list", "Mapping": "mapping"}
"""The names in YAML of abstract types."""


def summarise(message: str, keys: ConfigKeys | None) -> str:
    """Return a message of jsonargparse as one line: the key, and what is wrong with its value.

    Args:
        keys: the keys of this command line, to complete a key that jsonargparse shortened.
    """
    message, _, given = message.partition("Given value type:")
    key = ".".join(re.findall(r'Parser key "([^"]+)":', message))
    text = re.sub(r'(Problem with given class_path .*?:)|(Parser key "[^"]+":)', "", message)
    text = re.sub(r"Does not validate against any of the Union subtypes\s+Subtypes: .*\s+Errors:", "", text)
    lines = [line.strip().removeprefix("- ") for line in text.splitlines()]
    lines = [line for line in lines if line.strip("- ") and "NoneType" not in line]
    in_object = [i for i, line in enumerate(lines) if line.startswith("Type collections.abc.Callable")]
    if in_object:  # the value is an object, not a function: keep the error about the object's arguments
        lines = [re.sub(r"\. Got value: Namespace\(.*", "", line) for line in lines[in_object[-1] + 1 :]] or lines
    # ConfigKeys has found unknown keys and classes: these lines are about the alternatives to the class that is named.
    others = r"Option '.*' is not accepted|Import path .* does not correspond to a subclass of .*"
    lines = [line for line in lines if not re.fullmatch(others, line)] or lines
    # Drop the description of how a class may be written, which follows the reason.
    lines = list(takewhile(lambda line: not line.startswith("Not a valid subclass"), lines)) or lines
    value = re.search(r"Given value: (.*)", given)
    names = [name for line in lines for name in _expected(line)]
    if names and value and all(map(_expected, lines)):  # alternatives, none of which fits
        lines = [f"Expected a {' or '.join(dict.fromkeys(names))}. Got value: {value[1]}"]
    paths = [re.fullmatch("Expected a path but (.*) either not accessible or invalid", line) for line in lines]
    if any(paths) and any(line.startswith("Expected a dot import path string") for line in lines):
        lines = [f"expected keys with values, got '{path[1]}'" for path in paths if path]
    # Prefer messages about an item or an argument to messages about the whole value.
    lines = [line for line in lines if not _expected(line) and not line.startswith("Expected a path but")] or lines
    text = "; ".join(dict.fromkeys(lines))
    text = re.sub(
        r"Type collections\.abc\.Callable.* a subclass spec, but got (.*)", r"Expected a function. Got value: \1", text
    )
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", lambda found: _name_kind(found[1]), text)
    text = re.sub(r"Expected an? (?:typing\.)?(.+?)\. Got value: ([^;]*)", r"expected \1, got '\2'", text)
    text = re.sub(r"the following arguments are required: (.*)", r"it needs a value for '\1'", text)
    text = f"{text}{_suggest_value(text)}"
    return f"{keys.full_key(key) if keys else key}: {text}" if key else text


def _expected(line: str) -> list[str]:
    """Return the expected types or words in a line that lists only those; otherwise an empty list."""
    if words := re.fullmatch(r"Expected a typing\.Literal\[(.*)\]", line):
        return words[1].split(", ")
    kind = re.fullmatch(r"Expected a <class '(?:\w+\.)*(\w+)'>", line)
    return [_name_kind(kind[1])] if kind else []


def _name_kind(name: str) -> str:
    return KINDS.get(name, name)


def _suggest_value(text: str) -> str:
    """Return a sentence with the correct form of a value that has the wrong type; "" if unknown."""
    found = re.fullmatch(r"expected (.*), got '(.*)'", text)
    if found is None or "; " in found[2]:  # several reasons
        return ""
    if found[1] == "int":
        return f". Write {found[2].partition('.')[0]}." if re.fullmatch(r"[+-]?\d+\.0*", found[2]) else ""
    if found[1] == "list":
        is_item = re.fullmatch(r"[^\s\[\]{},]+", found[2]) is not None
        return f". Write [{found[2]}]." if is_item else ". Write a list, such as [first, second]."
    if found[1] == "function":
        item = re.fullmatch(r"\['([^']*)'\]", found[2])
        return f". Write {item[1]}." if item else ""
    words = re.findall(r"'([^']*)'", found[1])
    return f". {did_you_mean(found[2], words)}" if words else ""
