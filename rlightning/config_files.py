"""Reading configuration files so that nothing that they say is lost or becomes something else.

YAML 1.1, which PyYAML reads, takes ``no`` for false, and PyYAML keeps the last of several keys of one name.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonargparse._loaders_dumpers import get_yaml_default_loader  # which reads 1e-5 as a number

from rlightning.errors import ConfigError, did_you_mean

ROW_SUFFIXES = (".jsonl", ".csv", ".parquet")
"""Of files that hold rows of data, which can be large."""

NO_KEYS = "the file holds no keys. It needs lines such as 'name: value'."

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


def read_config(path: str, key: str = "config") -> Any:
    """Return the content of a configuration file, YAML or JSON: a mapping or a list.

    Args:
        path: the file.
        key: what it is given for, for the error.
    """
    file, where = Path(path).expanduser(), f"--{key} {path}"
    if not file.is_file():
        near = [str(f) for f in file.parent.glob("*.y*ml")] if file.parent.is_dir() else []
        hint = f" {did_you_mean(str(file), near)}" if near else " Paths count from the current folder."
        raise ConfigError(f"{where}: there is no such file.{hint}")
    if file.suffix in ROW_SUFFIXES:
        raise ConfigError(
            f"{where}: rows are no configuration. Name a prompt set by data.train, data.validation or data.predict."
        )
    try:
        text = file.read_text(encoding="utf-8")
        content = _load_json(text, path) if file.suffix == ".json" else load_yaml(text)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: the file is not in UTF-8. Name a YAML file.") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}: not valid JSON ({error.msg}).") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ConfigError(f"{path}, line {line}: not valid YAML ({error.problem}).") from error
    if not isinstance(content, dict | list):
        raise ConfigError(f"{where}: {NO_KEYS}")
    return content


def read_keys(path: str, key: str = "config") -> dict[str, Any]:
    """Return the content of a configuration file that holds keys, not a list; see :func:`read_config`."""
    content = read_config(path, key)
    if not isinstance(content, dict):
        raise ConfigError(f"--{key} {path}: {NO_KEYS}")
    return content


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


def _load_json(text: str, path: str) -> Any:
    """Read JSON, a hundred times as fast as by YAML's reader; no mapping has a key twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"{path}: the key '{name}' is there twice. Remove or rename one of them.")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=unique)


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
