"""Rewrites command line options: short names of strategies are replaced by their classes, names of files are marked."""

import json
import os

import yaml
from jsonargparse import get_loader, set_loader

from rlightning.config.files import WrittenText, load_yaml
from rlightning.parallel.strategy_names import KEYS, spell_out

_load_yaml = get_loader("yaml")


def mark_files(options: list[str]) -> list[str]:
    """Return the options; names of existing files that YAML would read as null, list or mapping become WrittenText."""

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


def spell_out_options(options: list[str]) -> list[str]:
    """Return command line options in which short names of strategies are replaced by their classes."""
    names = [f"--{key}" for key in ("trainer", *KEYS, *(f"{key}.class_path" for key in KEYS))]
    spelled: list[str] = []
    words = iter(options)
    for word in words:
        name, equals, value = word.partition("=")
        given = next(words, None) if name in names and not equals else value
        if name in names and given is not None:  # the check of options reports a missing value
            word = f"{name}={_spell_out_text(given, name.removeprefix('--'))}"
        spelled.append(word)
    return spelled


def spell_out_files() -> None:
    """Make jsonargparse expand short names of strategies in all YAML that it reads from now on."""
    set_loader("yaml", lambda text: spell_out(_load_yaml(text)), (yaml.YAMLError,))


def _spell_out_text(text: str, key: str) -> str:
    """Expand a strategy's name in an option's value; a value without one is returned unchanged."""
    try:
        value = load_yaml(text)
    except yaml.YAMLError:
        return text
    spelled = spell_out(value, key)
    if spelled == value:
        return text
    return spelled if isinstance(spelled, str) else json.dumps(spelled)
