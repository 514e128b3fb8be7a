"""Expands short names of strategies in YAML files and options, see :mod:`rlightning.parallel.strategy_names`."""

import json
from collections.abc import Iterator

import yaml
from jsonargparse import get_loader, set_loader

from rlightning.config.files import load_yaml
from rlightning.parallel.strategy_names import KEYS, spell_out

_load_yaml = get_loader("yaml")


def spell_out_options(options: list[str]) -> list[str]:
    """Expand short names of strategies in command line options."""
    return list(_spell_out_each(options))


def spell_out_files() -> None:
    """Have jsonargparse expand short names of strategies in all YAML that it reads from now on."""
    set_loader("yaml", lambda text: spell_out(_load_yaml(text)), (yaml.YAMLError,))


def _spell_out_each(options: list[str]) -> Iterator[str]:
    rest = iter(options)
    for option in rest:
        name, equals, text = option.partition("=")
        if name.removeprefix("--") not in ("trainer", *KEYS, *(f"{key}.class_path" for key in KEYS)):
            yield option
            continue
        if not equals:
            value = next(rest, None)
            if value is None:  # left for the check of options to complain of
                yield option
                return
            text = value
        yield f"{name}={_spell_out_text(text, name.removeprefix('--'))}"


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
