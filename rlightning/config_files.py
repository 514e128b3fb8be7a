"""Reading configuration files so that nothing that they say is lost or becomes something else.

YAML 1.1, which PyYAML reads, takes ``no`` for false, and PyYAML keeps the last of several keys of one name.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonargparse._loaders_dumpers import get_yaml_default_loader  # which reads 1e-5 as a number

from rlightning.errors import ConfigError, did_you_mean

_TAG = "tag:yaml.org,2002:"


def use_strict_yaml() -> None:
    """Have jsonargparse read YAML as :func:`load_yaml` does. May be called twice."""
    loader: Any = get_yaml_default_loader()
    resolvers = {
        letter: [(tag, pattern) for tag, pattern in known if tag != f"{_TAG}bool"]
        for letter, known in loader.yaml_implicit_resolvers.items()
    }
    loader.yaml_implicit_resolvers = resolvers
    loader.add_implicit_resolver(f"{_TAG}bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
    loader.add_constructor(f"{_TAG}map", _construct_mapping)


def load_yaml(text: str) -> Any:
    """Read YAML as version 1.2 has it: ``yes``, ``no``, ``on`` and ``off`` are texts; no mapping has a key twice."""
    use_strict_yaml()
    return yaml.load(text, Loader=get_yaml_default_loader())


def read_yaml(path: str) -> Any:
    """Return the content of a YAML file.

    Raises:
        ConfigError: whatever keeps the file from being read as YAML.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        raise ConfigError(f"--config {path} is a folder. Name a YAML file.")
    if not file.is_file():
        near = [str(f) for f in file.parent.glob("*.y*ml")] if file.parent.is_dir() else []
        hint = f" {did_you_mean(str(file), near)}" if near else " Paths count from the current folder."
        raise ConfigError(f"--config {path}: there is no such file.{hint}")
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}.") from error
    try:
        return load_yaml(content.decode())
    except (ValueError, yaml.YAMLError) as error:
        line, reason = _locate(error, content)
        raise ConfigError(f"{path}, line {line}: not valid YAML ({reason}).") from error


def merge_mappings(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return both, the later over the earlier, nested mappings likewise; a class replaces another and its arguments."""
    merged = dict(earlier)
    for name, value in later.items():
        before = merged.get(name)
        both_nested = isinstance(before, Mapping) and isinstance(value, Mapping) and "class_path" not in value
        merged[name] = merge_mappings(before, value) if both_nested else value  # type: ignore[arg-type]
    return merged


def replace_files(options: list[str], contents: list[Any]) -> list[str]:
    """Return command line options in which the n-th ``--config`` has the n-th content in place of its file.

    Args:
        options: what follows the command.
        contents: one a file; None leaves the file.
    """
    rest, replaced = iter(contents), list(options)
    for i, option in enumerate(options):
        name, equals, _ = option.partition("=")
        if name not in ("--config", "-c"):
            continue
        content = next(rest)
        if content is not None:
            text = yaml.safe_dump(content, sort_keys=False)
            replaced[i if equals else i + 1] = f"{name}={text}" if equals else text
    return replaced


def _locate(error: Exception, content: bytes) -> tuple[int | str, str]:
    """The line in which a file's content is not YAML, counted from 1, and why it is not."""
    if isinstance(error, yaml.MarkedYAMLError):
        return error.problem_mark.line + 1 if error.problem_mark else "?", str(error.problem)
    if isinstance(error, UnicodeDecodeError):
        return content[: error.start].count(b"\n") + 1, f"byte 0x{content[error.start]:02X} is not UTF-8"
    if isinstance(error, yaml.reader.ReaderError):
        line = content[: error.position].count(b"\n") + 1
        return line, f"U+{error.character:04X} is a control character: write it as an escape in double quotes"
    return "?", str(error)


def _construct_mapping(loader: Any, node: yaml.MappingNode) -> Iterator[Any]:
    """Construct a mapping whose keys are texts or numbers, each once."""
    lines: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == f"{_TAG}merge":
            continue
        if key.value in lines:
            rule = f"the key '{key.value}' is in line {lines[key.value]} already: remove or rename one of them"
            raise yaml.constructor.ConstructorError(None, None, rule, key.start_mark)
        lines[key.value] = key.start_mark.line + 1
        if key.tag in (f"{_TAG}bool", f"{_TAG}null"):
            key.tag = f"{_TAG}str"
    yield from loader.construct_yaml_map(node)
