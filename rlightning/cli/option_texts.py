"""Options of the command line as texts: files in them replaced by their content, mappings begun, file names kept."""

import os
from collections.abc import Iterable
from typing import Any

import yaml

from rlightning.config.files import WrittenText, dump_yaml, load_yaml


def replace_files(options: list[str], contents: list[Any]) -> list[str]:
    """Return command line options in which the n-th ``--config`` has the n-th content in place of its file.

    Args:
        contents: one a file; None leaves the file.
    """
    rest, replaced = iter(contents), list(options)
    for i, option in enumerate(options):
        name, equals, _ = option.partition("=")
        if name not in ("--config", "-c"):
            continue
        content = next(rest)
        if content is not None:
            text = dump_yaml(content)
            replaced[i if equals else i + 1] = f"{name}={text}" if equals else text
    return replaced


def begin_mappings(options: list[str], keys: Iterable[str]) -> list[str]:
    """Return command line options that set each mapping to an empty one before the first option of a key in it."""
    begun = list(options)
    for key in keys:
        place = next(i for i, option in enumerate(begun) if option.lstrip("-").startswith(f"{key}."))
        begun.insert(place, f"--{key}={{}}")
    return begun


def mark_files(options: list[str]) -> list[str]:
    """Return command line options in which the name of an existing file is a :class:`WrittenText` if YAML alters it."""

    def is_marked(text: str) -> bool:
        try:
            read = text if text in ("null", "~", "") else load_yaml(text)
        except yaml.YAMLError:
            return False
        return isinstance(read, dict | list | None) and os.path.isfile(text)

    marked: list[str] = []
    for option in options:
        name, _, value = option.partition("=")
        if option.startswith("--"):
            marked += [name, WrittenText(value)] if is_marked(value) else [option]
        else:
            marked.append(WrittenText(option) if is_marked(option) else option)
    return marked
