"""Reads and writes configurations so that no value is lost, and no text becomes a number.

PyYAML reads YAML 1.1, in which ``no`` is false, ``010`` is 8 and ``1:30`` is 90, and keeps the last of duplicate keys.
This module reads YAML 1.2, with keys as texts and without duplicates, and writes files that both versions read in the
same way.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

import yaml
from jsonargparse import set_dumper
from jsonargparse.typing import register_type

from rlightning.config.jsonargparse_internals import get_yaml_default_loader
from rlightning.errors import ConfigError, did_you_mean
from rlightning.foreign_text import cut_value
from rlightning.python_values import map_items

ROW_SUFFIXES = (".jsonl", ".csv", ".parquet")
"""Suffixes of files with rows of data, which can be large."""

NO_KEYS = "the file holds no keys. It needs lines such as 'name: value'."

_TAG = "tag:yaml.org,2002:"


_DIGITS = "0123456789"
_RESOLVERS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+" + _DIGITS)),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+." + _DIGITS),
    ),
    "merge": ("<<", ["<"]),
}
"""YAML 1.2's core schema and the merge key: a pattern and possible first letters for each type of plain scalar."""


_SURROGATE = re.compile("[\ud800-\udfff]")
TOO_DEEP = "lists or mappings are nested too deeply to be read: flatten them"


T = TypeVar("T")


class WrittenText(str):
    """A string that YAML would read as another value without its quotes, such as ``"010"``; jsonargparse keeps it.

    jsonargparse parses a ``str`` as YAML again if the type hint is ``Any``, but not an instance of this class.
    """


register_type(WrittenText, serializer=lambda text: text)


def plain_texts(value: T) -> T:
    """Return a value in which each :class:`WrittenText`, also in mappings and lists, is replaced by a ``str``."""
    return map_items(lambda one: str.__str__(one) if isinstance(one, WrittenText) else one, value)


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes texts which YAML 1.1 or 1.2 would read as another value."""


_Dumper.add_representer(WrittenText, yaml.SafeDumper.represent_str)

for _name in ("int", "float"):
    _pattern, _letters = _RESOLVERS[_name]
    _Dumper.add_implicit_resolver(f"{_TAG}{_name}", re.compile(rf"^(?:{_pattern})$"), _letters)


def use_strict_yaml() -> None:
    """Have jsonargparse read YAML by :func:`load_yaml` and write it by :func:`dump_yaml`. May be called twice."""
    loader: Any = get_yaml_default_loader()
    loader.yaml_implicit_resolvers = {}
    for name, (pattern, letters) in _RESOLVERS.items():
        loader.add_implicit_resolver(f"{_TAG}{name}", re.compile(rf"^(?:{pattern})$"), letters)
    loader.add_constructor(f"{_TAG}str", _construct_text)
    loader.add_constructor(f"{_TAG}int", _construct_int)
    loader.add_constructor(f"{_TAG}float", _construct_float)
    loader.add_constructor(f"{_TAG}merge", loader.construct_yaml_str)
    loader.add_constructor(f"{_TAG}map", _construct_mapping)
    set_dumper("yaml", dump_yaml)


def load_yaml(text: str) -> object:
    """Return the value of a YAML 1.2 text: ``yes`` and ``1:30`` are texts, keys become texts and must be unique."""
    use_strict_yaml()
    try:
        return plain_texts(_load(text))
    except RecursionError as error:
        raise yaml.YAMLError(TOO_DEEP) from error


def load_keys(text: str) -> dict[str, object]:
    """Return the mapping that a YAML text contains, such as one written by :func:`dump_yaml`."""
    loaded = load_yaml(text)
    assert isinstance(loaded, dict)
    return loaded


def dump_yaml(content: object) -> str:
    """Return ``content`` as a YAML text; texts are quoted if YAML 1.1 or 1.2 would read them as other values."""
    return yaml.dump(content, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)


def read_config(path: str, key: str = "config") -> object:
    """Return the content of a configuration file, YAML or JSON: a mapping or a list.

    Args:
        key: the key that names the file, for the error.

    Raises:
        ConfigError: the file cannot be read or parsed.
    """
    file, where = Path(path).expanduser(), f"--{key} {path}"
    if file.is_dir():
        raise ConfigError(f"{where} is a folder. Name a YAML file.")
    if not file.is_file():
        near = sorted(str(f) for f in file.parent.glob("*.y*ml")) if file.parent.is_dir() else []
        hint = f" {did_you_mean(str(file), near)}" if near else " Paths count from the current folder."
        raise ConfigError(f"{where}: there is no such file.{hint}")
    if file.suffix in ROW_SUFFIXES:
        raise ConfigError(
            f"{where}: rows are no configuration. Name a prompt set by data.train, data.validation or data.predict."
        )
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}.") from error
    is_json = file.suffix == ".json"
    try:
        text = content.decode()
        loaded = _load_json(text, path) if is_json else load_yaml(text)
    except ConfigError:
        raise
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: the file is not in UTF-8. Name a YAML file.") from error
    except (ValueError, yaml.YAMLError) as error:
        line, reason = _locate(error, content)
        raise ConfigError(f"{path}, line {line}: not valid {'JSON' if is_json else 'YAML'} ({reason}).") from error
    if not isinstance(loaded, dict | list):
        raise ConfigError(f"{where}: {NO_KEYS}")
    check_texts(loaded, path)
    return loaded


def check_texts(value: object, where: str) -> None:
    """Raise a ConfigError for a string with an unpaired surrogate, which UTF-8 cannot encode."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list):
        for part in value:
            check_texts(part, where)
    elif isinstance(value, str) and (found := _SURROGATE.search(value)):
        raise ConfigError(
            f"{where}: {cut_value(value)} holds U+{ord(found[0]):04X}, half of a character. Write the whole character."
        )


def read_keys(path: str, key: str = "config") -> dict[str, object]:
    """Return the mapping in a configuration file; raise a ConfigError if it cannot be read, or has other content."""
    loaded = read_config(path, key)
    if not isinstance(loaded, dict):
        raise ConfigError(f"--{key} {path}: {NO_KEYS}")
    return loaded


def merge_mappings(earlier: Mapping[str, object], later: Mapping[str, object]) -> dict[str, object]:
    """Return nested mappings merged, the later over the earlier; one with a ``class_path`` replaces the earlier one."""
    merged = dict(earlier)
    for name, value in later.items():
        before = merged.get(name)
        if isinstance(before, Mapping) and isinstance(value, Mapping) and "class_path" not in value:
            value = merge_mappings(before, value)
        merged[name] = value
    return merged


def nest_names(values: dict[str, object], key: str) -> None:
    """Replace a mapping's dotted keys, such as ``a.b: x``, by nested ones, ``a: {b: x}``, in place.

    Args:
        values: a mapping of a file whose values are mappings.
        key: configuration key of the mapping, for the error.

    Raises:
        ConfigError: ``a`` exists too, and is not a mapping.
    """
    for written in [name for name in values if "." in name]:
        name, _, rest = written.partition(".")
        earlier = values.get(name, {})
        if not isinstance(earlier, dict):
            raise ConfigError(f"{key}.{name}: the file sets this key twice. Remove one of them.")
        values[name] = {**earlier, rest: values.pop(written)}


def _load_json(text: str, path: str) -> object:
    """Read JSON, a hundred times as fast as by YAML's reader; duplicate keys are errors."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"{path}: the key '{name}' is there twice. Remove or rename one of them.")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error


def _locate(error: Exception, content: bytes) -> tuple[int | str, str]:
    """Return the line (counted from 1) in which a file's content is invalid, and the reason."""
    if isinstance(error, yaml.MarkedYAMLError):
        return error.problem_mark.line + 1 if error.problem_mark else "?", str(error.problem)
    if isinstance(error, json.JSONDecodeError):
        return error.lineno, error.msg
    if isinstance(error, yaml.reader.ReaderError):
        line = content[: error.position].count(b"\n") + 1
        return line, f"U+{error.character:04X} is a control character: write it as an escape in double quotes"
    return "?", str(error)


def _load(text: str) -> object:
    return yaml.load(text, Loader=get_yaml_default_loader())


def _construct_text(loader: yaml.constructor.SafeConstructor, node: yaml.ScalarNode) -> str:
    text: str = loader.construct_scalar(node)
    if not node.style:
        return text
    try:
        return text if _load(text) == text else WrittenText(text)
    except (yaml.YAMLError, ValueError):
        return WrittenText(text)


def _construct_int(loader: yaml.constructor.SafeConstructor, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    try:
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    except ValueError as error:
        raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error


def _construct_float(loader: yaml.constructor.SafeConstructor, node: yaml.ScalarNode) -> float:
    text = loader.construct_scalar(node)
    try:
        return float(re.sub(r"\.(inf|nan)$", r"\1", text, flags=re.IGNORECASE))
    except ValueError as error:
        raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error


def _construct_mapping(loader: yaml.constructor.SafeConstructor, node: yaml.MappingNode) -> Iterator[object]:
    _check_keys(node)
    yield from loader.construct_yaml_map(node)


_checked: WeakSet[yaml.MappingNode] = WeakSet()
"""Mappings whose keys have been checked; by aliases, one may occur several times in a file."""


def _check_keys(node: yaml.MappingNode) -> None:
    """Convert a mapping's keys to texts, and raise an error for duplicates, before merge keys are resolved."""
    if node in _checked:
        return
    _checked.add(node)
    lines: dict[str, int] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        is_merge = key.tag == f"{_TAG}merge"
        if key.value in lines:
            way_out = "give both in one, as '<<: [*a, *b]'" if is_merge else "remove or rename one of them"
            rule = f"the key '{key.value}' is in line {lines[key.value]} already: {way_out}"
            raise yaml.constructor.ConstructorError(None, None, rule, key.start_mark)
        lines[key.value] = key.start_mark.line + 1
        if not is_merge:
            key.tag, key.style = f"{_TAG}str", None
            continue
        for part in value.value if isinstance(value, yaml.SequenceNode) else [value]:
            if isinstance(part, yaml.MappingNode):
                _check_keys(part)
