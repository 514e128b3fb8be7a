"""Checks the keys of a configuration before any object is built from it.

jsonargparse finds unknown keys too, but its errors name neither their place nor the nearest known key, are long, and it
accepts abbreviated keys. Here every file and every option is checked against the parameters of the classes that they
name, in the order in which jsonargparse merges them.
"""

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from types import NoneType
from typing import Literal, get_args, get_origin

import yaml

from rlightning.cli.named_classes import find_class, name_of, not_a_subclass, subclasses
from rlightning.config.argument_checks import parameters_of
from rlightning.config.files import (
    WrittenText,
    check_texts,
    dump_yaml,
    load_yaml,
    merge_mappings,
    nest_names,
    plain_texts,
    read_config,
    read_keys,
)
from rlightning.config.peer_names import ELSEWHERE, suggest_name
from rlightning.config.type_hints import (
    Parameters,
    flatten_union,
    is_callable,
    is_configurable,
    is_mapping,
    is_sequence,
    is_text,
    item_hints,
    takes_null,
    takes_text,
)
from rlightning.errors import ConfigError
from rlightning.foreign_text import cut_value
from rlightning.parallel.strategy_names import spell_out

SPEC_KEYS = {"class_path", "init_args", "dict_kwargs"}
"""Keys by which a mapping names a class, in jsonargparse's convention."""


class ConfigKeys:
    """Reads configuration files and options in their order, and raises a ConfigError for the first unknown key.

    Attributes:
        parameters: the command's keys.
        classes: the class that each key names so far, such as ``{"model": GRPO}``.
        seen: every key read so far, in full.
    """

    def __init__(self, parameters: Parameters, classes: Mapping[str, object]) -> None:
        self.parameters = parameters
        self.classes = dict(classes)
        self._usual_classes = dict(classes)
        self.seen: list[str] = []
        self._mappings: dict[str, dict[str, object]] = {}  # the mappings set by the files read so far, by key
        self._is_in_file = False
        self._begun: set[str] = set()  # the keys of mappings that are set
        self._unset: list[str] = []  # the keys of mappings of which the current option sets the first item
        self._objects: list[str] = []  # the keys of objects, from the outermost, that the current option changes
        self._leaves: set[str] = set()  # the keys that the current file sets to anything but a mapping

    def check_options(self, options: list[str]) -> list[str]:
        """Raise a ConfigError for the first unknown key or class in the options and the files of ``--config``.

        Returns:
            The options for jsonargparse: files are replaced by their content where earlier files change it, and a
            mapping that nothing has set is set to ``{}`` before the option that sets an item of it. A null for an
            argument of an object inside an object is given in a mapping: jsonargparse would read it as 'None'.
        """
        checked: list[str] = []
        for key, value, words in split_options(options):
            check_texts(value, f"--{key}")
            if key in ("config", "c"):
                content = self.check_file(value)
                words = words if content is None else [f"--config={dump_yaml(content)}"]
            elif key.rsplit(".", 1)[-1] != "help" and key.split("=")[0] != "print_config":
                self._unset, self._objects = [], []
                self.check_option(key, value)
                words = self._spell_out_null(key, value) or words
                checked += [f"--{name}={{}}" for name in self._unset]
            checked += words
        return checked

    def check_option(self, key: str, text: str) -> None:
        """Raise a ConfigError if an option's key, or a key or class in its value, is unknown."""
        self.check_mapping({key: parse_value(text)}, self.parameters, "")

    def check_file(self, path: str) -> dict[str, object] | None:
        """Raise a ConfigError for an unknown key or class in a YAML file.

        Returns:
            The content merged with the mappings of earlier files; None if they change nothing.
        """
        content = spell_out(read_keys(path))
        written = deepcopy(content)
        self._is_in_file = True
        self._leaves = set()
        self.check_mapping(content, self.parameters, "")
        self._is_in_file = False
        return None if content == written else content

    def full_key(self, key: str) -> str:
        """Return the full key that ends with ``key``, if just one of the keys read so far does; else ``key`` itself.

        Of a class in a mapping jsonargparse leaves out the name: of ``environment.math.tools`` it says
        ``environment.tools``.
        """
        section, _, rest = key.partition(".")
        seen = {plain_key(name) for name in self.seen}
        ends = {name for name in self.seen if name == key or name.endswith("." + key)}
        named = {name for name in seen if name.startswith(f"{section}.") and name.endswith(f".{rest}")}
        for found in (ends, named):
            if len(found) == 1:
                return found.pop()
        return key

    def check_mapping(self, values: Mapping[str, object], parameters: Parameters, where: str) -> None:
        """Raise a ConfigError for the first key of a mapping, also nested, that ``parameters`` lack.

        Args:
            values: keys, dotted or nested, and their values.
            parameters: names, in nested dicts, and their type hints.
            where: the key of the mapping.
        """
        for written, value in values.items():
            name, _, rest = str(written).partition(".")
            is_set = not rest and not name.endswith("+") and not isinstance(value, dict)
            name = name.removesuffix("+")
            value = {rest: value} if rest else value
            key = f"{where}.{name}" if where else name
            if self._is_in_file and is_set:
                self._check_set_once(plain_key(key))
            if name not in parameters:
                raise ConfigError(f"{key}: there is no such key. {suggest_name(name, parameters)}")
            self.seen.append(key)
            hint = parameters[name]
            if isinstance(hint, dict):
                if isinstance(value, str) and Path(value).is_file():
                    value = read_keys(value, key)
                if isinstance(value, dict):
                    self.check_mapping(value, hint, key)
                elif value is not None:
                    raise no_keys(key, value, hint)
            else:
                self.check_value(value, hint, key)

    def check_value(self, value: object, hint: object, key: str) -> None:
        """Raise a ConfigError for an unknown class or key in the value of ``key``, or a null where none is allowed."""
        options = list(flatten_union(hint))
        if any(is_mapping(option) for option in options):
            self._begin(value, options, key)
            if self._is_in_file and "[" not in key:  # a later file's list replaces an earlier one entirely
                self._merge(value, plain_key(key))
        bases = [option for option in options if is_configurable(option)]
        if value is None and not bases and not takes_null(options):
            raise ConfigError(f"{key}: null is no value for it. Leave the key out for its default, or give a value.")
        items = [item for option in options if is_sequence(option) for item in item_hints(option)]
        alternatives = options if bases else [option for item in items for option in flatten_union(item)]
        classes = [option for option in alternatives if is_configurable(option)]
        words = {"null", "", *(w for option in options if get_origin(option) is Literal for w in get_args(option))}
        is_plain_list = isinstance(value, list) and not items
        is_plain_number = isinstance(value, bool | int | float) and all(map(is_keys, options))
        if isinstance(value, str) and classes and value not in words:
            if not takes_text(hint) and Path(value).is_file():
                self.check_value(read_config(value, key) if items else read_keys(value, key), hint, key)
            elif not any(is_text(option) and get_origin(option) is not Literal for option in alternatives):
                self._check_not_path(value, classes, key)
                found = self.find_class(value, classes, key)
                if inspect.isfunction(found) and not any(is_callable(option) for option in alternatives):
                    returns = found.__annotations__.get("return", object)  # jsonargparse takes a function of an object
                    if isinstance(returns, type) and not issubclass(returns, tuple(classes)):
                        raise not_a_subclass(key, value, classes)
                self.classes[key] = found
        elif bases and (is_plain_list or is_plain_number):
            raise no_keys(key, value, self.parameters_of(bases[0]))
        elif isinstance(value, list):
            for i, item in enumerate(value):
                for item_hint in items[:1]:
                    self.check_value(item, item_hint, f"{key}[{i}]")
                self.classes.update({key: self.classes[f"{key}[{i}]"]} if f"{key}[{i}]" in self.classes else {})
        elif isinstance(value, dict):
            by_name = [option for option in options if is_mapping(option) and len(get_args(option)) == 2]
            is_class = bool(SPEC_KEYS & value.keys()) or key in self.classes
            if is_class or (len(bases) == 1 and not by_name):
                takes_any = any(is_callable(option) for option in alternatives)
                self.check_spec(value, [] if takes_any and "class_path" in value else classes, key)
            for option in () if is_class else by_name:
                for written, item in value.items():
                    name, _, rest = str(written).partition(".")
                    self.check_value({rest: item} if rest else item, get_args(option)[1], f"{key}.{name}")

    def _spell_out_null(self, key: str, text: str) -> list[str]:
        """Return the words that set an argument of an object inside an object to null; [] for another option."""
        if len(self._objects) < 2 or parse_value(text) is not None:
            return []
        parent = self._objects[-1]
        name = key.removeprefix(f"{parent}.").removeprefix("init_args.")
        return [f"--{parent}={json.dumps({name: None})}"] if "." not in name.removesuffix("+") else []

    def _check_not_path(self, text: str, classes: list[type], key: str) -> None:
        """Raise a ConfigError for a text that names no class, if the class has an argument ``path`` for it."""
        names = {kind.__name__ for base in classes for kind in subclasses(base)}
        is_dotted = "." in text and "/" not in text and not Path(text).is_dir()
        if text not in names and not is_dotted and any("path" in self.parameters_of(kind) for kind in classes):
            raise ConfigError(f"{key}: '{text}' is not a class. For a folder, write {key}.path: {text}.")

    def _check_set_once(self, key: str) -> None:
        """Raise a ConfigError if a file sets one key twice, nested in one place and dotted in another."""
        if key in self._leaves:
            raise ConfigError(f"{key}: the file sets this key twice. Remove one of them.")
        self._leaves.add(key)

    def _begin(self, value: object, options: list[object], key: str) -> None:
        """Nest dotted names in a mapping; record the mapping if an option sets its first item."""
        items = (item for option in options if is_mapping(option) for item in item_hints(option))
        has_keys = any(is_configurable(kind) for item in items for kind in flatten_union(item))
        if isinstance(value, dict) and has_keys and any("." in name for name in value):
            if self._is_in_file:
                nest_names(value, key)
            elif plain_key(key) not in self._begun:
                self._unset.append(key)
        self._begun.add(plain_key(key))

    def _merge(self, value: object, key: str) -> None:
        """Merge a file's mapping with that of earlier files, which jsonargparse would replace."""
        if isinstance(value, dict) and not SPEC_KEYS & value.keys():
            merged = merge_mappings(self._mappings.get(key, {}), value)
            value.clear()
            value.update(merged)
            self._mappings[key] = deepcopy(value)
        else:
            self._mappings.pop(key, None)

    def check_spec(self, value: Mapping[str, object], bases: list[type], key: str) -> None:
        """Raise a ConfigError if a mapping names an unknown class, or gives it an argument that it lacks."""
        self._objects.append(key)
        if "class_path" in value:
            self.classes[key] = self.find_class(str(value["class_path"]), bases, f"{key}.class_path")
        chosen = self.classes.get(key, bases[0] if len(bases) == 1 else None)
        if chosen is None:
            return
        if key not in self.classes and inspect.isabstract(chosen):
            raise ConfigError(f"{key}: these keys are of no class yet. Name it before them, by --{key} CLASS.")
        parameters, is_spelled_out = self.parameters_of(chosen), bool(SPEC_KEYS & value.keys())
        for name, inner in value.items():
            group, _, nested = str(name).partition(".")
            if group not in SPEC_KEYS:
                if is_spelled_out and parameters and group not in parameters:
                    near = suggest_name(group, [*parameters, *SPEC_KEYS])
                    raise ConfigError(f"{key}.{name}: there is no such key. {near}")
                if is_spelled_out:
                    raise ConfigError(f"{key}.{name}: beside class_path, keys stand under init_args. Move it there.")
                self._check_arguments({name: inner}, chosen, key, key)
            elif group == "init_args":
                arguments = {nested: inner} if nested else inner
                if isinstance(arguments, dict):
                    self._check_arguments(arguments, chosen, key, f"{key}.init_args")

    def _check_arguments(self, arguments: Mapping[str, object], chosen: object, key: str, where: str) -> None:
        """Raise a ConfigError for an argument that the class chosen for ``key`` lacks; one that the key's usual class
        has is said to be that class's.
        """
        parameters, usual = self.parameters_of(chosen), self._usual_classes.get(key, chosen)
        for written in arguments:
            name = str(written).partition(".")[0].removesuffix("+")
            if name not in parameters and name in self.parameters_of(usual):
                raise ConfigError(
                    f"{where}.{name}: {name_of(chosen)} has no such key; {name_of(usual)} has. Leave it out, or set "
                    f"{key}.class_path to {name_of(usual)}."
                )
        self.check_mapping(arguments, parameters, where)

    def find_class(self, path: str, bases: list[type], key: str) -> object:
        """Return the class or function of a dotted path or bare name; raise a ConfigError if there is none."""
        found = find_class(path, bases, key)
        if key.endswith(".class_path") and not isinstance(found, type):
            raise ConfigError(f"{key}: '{path}' is not a class. A function is named without class_path.")
        return found

    def parameters_of(self, kind: object) -> Parameters:
        """Return the type hints, by name, of the arguments of a class; {} for a function."""
        return parameters_of(kind) if isinstance(kind, type) else {}


def plain_key(key: str) -> str:
    """Return a dotted key without its ``.init_args`` parts."""
    return key.replace(".init_args.", ".")


def asks_for_help(options: list[str]) -> bool:
    """Return whether the options ask for help, in which case all others are ignored."""
    return any(option in ("-h", "--help") or option.endswith(".help") for option in options)


def check_model(keys: ConfigKeys) -> None:
    """Raise a ConfigError if the configuration names no algorithm."""
    if "model" not in keys.classes:
        raise ConfigError(
            "model.class_path: no algorithm is named. Add 'model: {class_path: rlightning.algorithms.GRPO, "
            "init_args: {model: ...}}' to the YAML file that --config names."
        )


def is_keys(hint: object) -> bool:
    """Return whether the values of a type hint are null or have keys in YAML: mappings, and objects of a class."""
    return hint is NoneType or is_mapping(hint) or is_configurable(hint)


def no_keys(key: str, value: object, parameters: Iterable[str]) -> ConfigError:
    """Return the error for a key that has a value but needs nested keys, such as those in ``parameters``."""
    name = key.rpartition(".")[2]
    if key in {f"environment.{one}" for one in ELSEWHERE}:  # not the name of an environment
        return ConfigError(f"{key}: there is no such key. {suggest_name(name, ())}")
    line = next((f"  {name}: value" for name in parameters), "  class_path: name")
    place = key.rpartition(".")[0]
    way_out = f" If '{name}' is an argument, name its class by {place}.class_path." if place == "environment" else ""
    return ConfigError(
        f"{key}={cut_value(value)}: here stand keys, not a value. Write '{key}:', and below it lines such as '{line}'."
        f"{way_out}"
    )


def split_options(options: list[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield each option's key, its value and its words, which are ``--key value`` or ``--key=value``.

    Raises:
        ConfigError: a value is missing.
    """
    position = 0
    while position < len(options):
        option, words = options[position], options[position : position + 1]
        position += 1
        if not option.startswith("-"):
            hint = f" A file is given by --config {option}." if option.endswith((".yaml", ".yml", ".json")) else ""
            raise ConfigError(f"'{option}' follows no option; options look like --trainer.max_steps 100.{hint}")
        key, equals, value = option.lstrip("-").partition("=")
        if not equals and position < len(options) and not options[position].startswith("--"):
            value = options[position]
            words.append(value)
            position += 1
        elif not equals and key.rsplit(".", 1)[-1] not in ("help", "print_config"):
            raise ConfigError(f"{option}: its value is missing. Write {option} VALUE.")
        yield key, value, words


def parse_value(text: str) -> object:
    """Return the value of an option's text, read as YAML; the text itself if it is not valid YAML."""
    if isinstance(text, WrittenText):
        return plain_texts(text)
    try:
        return load_yaml(text)
    except yaml.YAMLError:
        return text
