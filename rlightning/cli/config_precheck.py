"""Checks keys, values and class names before torch is imported, by reading the source of the package's classes.

Checked are the sections; the keys directly in ``trainer``, ``model``, ``data`` and ``rollout`` if the class is this
package's; values whose type is known from source (:mod:`rlightning.cli.source_parameters`); dotted paths into this
package; and bare names, unless a user's module is named, whose classes may have any name. The parser later checks
everything with the classes themselves, by the same rules (:mod:`rlightning.cli.config_keys`).
"""

import os
import re
import sys
from argparse import ArgumentError
from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from jsonargparse import ArgumentParser

from rlightning.cli.config_keys import ConfigKeys, asks_for_help, check_model, plain_key
from rlightning.cli.named_classes import no_class, no_module, no_name, subclasses
from rlightning.cli.option_texts import spell_out_options
from rlightning.cli.parser_messages import summarise
from rlightning.cli.source_parameters import (
    class_names,
    find_folders,
    find_missing_module,
    find_source,
    has_name,
    parameters_of_source,
    subclass_names,
)
from rlightning.config.type_hints import Parameters
from rlightning.errors import ConfigError
from rlightning.parallel.strategy_names import CHOICES, CLASSES, KEY, no_strategy

TRAINER = "lightning.pytorch.trainer.trainer.Trainer"
PACKAGES = {"model": "rlightning.algorithms", "data": "rlightning.data", "rollout": "rlightning.callbacks"}
"""The package of the classes that a section may name by bare name, by section."""
BASES = {
    "model": "rlightning.module.rl_module.RLModule",
    "data": "rlightning.data.module.PromptDataModule",
    "rollout": "rlightning.callbacks.rollout.RolloutCallback",
    "environment": "rlightning.environments.environment.Environment",
    "trainer.callbacks": "lightning.pytorch.callbacks.callback.Callback",
    "trainer.logger": "lightning.pytorch.loggers.logger.Logger",
    KEY: "lightning.pytorch.strategies.strategy.Strategy",
}
"""The base class whose subclasses may be given by bare name, by key."""
USUAL_CLASSES = {"data": "rlightning.data.PromptDataModule", "rollout": "rlightning.callbacks.VLLMRollout"}
REWARDS = "model.rewards"
SET_BY_SECTIONS = {"model", "train_dataloaders", "val_dataloaders", "dataloaders", "datamodule", "return_predictions"}
"""Parameters of the Trainer's methods that no key of the configuration sets."""


class Given(NamedTuple):
    """A configured value, which SourceKeys stores while it reads keys, and checks after it has read all of them.

    Attributes:
        value: value from a file, or text of an option.
        hint: type hint of the key; None if unknown.
        is_option: whether the value is from the command line, where texts may be parsed as other values.
    """

    value: object
    hint: object
    is_option: bool = False


def check_strategy_name(name: object) -> None:
    """Raise a ConfigError if neither this package nor Lightning has a strategy of this name."""
    if not isinstance(name, str) or name in (*CHOICES, *CLASSES) or "." in name:
        return
    files = [file for folder in find_folders("lightning") for file in folder.rglob("*.py")]
    if files and not any(f'"{name}"' in file.read_text(encoding="utf-8") for file in files):
        raise no_strategy(name)


def check_rewards(value: object) -> None:
    """Raise a ConfigError for a dotted path into :mod:`rlightning.rewards` that names no function.

    Args:
        value: one or several rewards: dotted paths of functions, or mappings with such a path.
    """
    for reward in value if isinstance(value, list) else [value]:
        path = reward.get("function") if isinstance(reward, dict) else reward
        if not isinstance(path, str) or not path.startswith("rlightning.rewards."):
            continue
        module, _, name = path.rpartition(".")
        if find_missing_module(module) is not None or not has_name(module, name):
            from rlightning.rewards.lookup import import_function

            import_function(path)


def check_by_parser(key: str, given: Given) -> None:
    """Raise a ConfigError if jsonargparse would refuse the value of a key with a known type hint."""
    if isinstance(given.value, str) and os.path.exists(os.path.expanduser(given.value)):  # may be read as a file
        return
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=given.hint)
    try:
        if given.is_option:
            parser.parse_args([f"--value={given.value}"])
        else:
            parser.parse_object({"value": given.value})
    except ArgumentError as error:
        raise ConfigError(summarise(str(error).replace('"value"', f'"{key}"', 1), None)) from error


class SourceKeys(ConfigKeys):
    """Checks keys like ConfigKeys, but reads classes from source; a class is represented by its dotted path, or None.

    Attributes:
        given: the last value of each key, if it is known for sure.
        has_foreign_modules: whether a class of a module outside of this package and Lightning was named, which may
            define classes of any name.
    """

    def __init__(self, parameters: Parameters, classes: Mapping[str, object]) -> None:
        super().__init__(parameters, classes)
        self.given: dict[str, Given] = {}
        self.has_foreign_modules = False

    def check_option(self, key: str, text: str) -> None:
        """Raise a ConfigError if an option's key, or a key or class in its value, is unknown; store its text."""
        super().check_option(key, text)
        given = self.given.get(plain_key(key))
        if given is not None and given.hint is not None:
            self.given[plain_key(key)] = Given(text, given.hint, is_option=True)

    def check_mapping(self, values: Mapping[str, object], parameters: Parameters, where: str) -> None:
        """Raise a ConfigError for an unknown key of a mapping; store the keys' values in :attr:`given`."""
        super().check_mapping(values, parameters, where)
        for name, value in values.items():
            first = name.partition(".")[0].removesuffix("+")
            hint = parameters[first]
            key = plain_key(f"{where}.{first}" if where else first)
            is_checked = key in (KEY, REWARDS) or (hint is not None and not isinstance(hint, dict))
            if name == first and is_checked:
                self.given[key] = Given(value, hint)
            else:  # a type that is not known, a section, or a part of a value
                self.given.pop(key, None)

    def check_value(self, value: object, hint: object, key: str) -> None:
        """Raise a ConfigError for an unknown class, or an unknown key, in the value of ``key``."""
        if key not in PACKAGES:
            if hint is not None:
                super().check_value(value, hint, key)
            elif not (key == KEY and isinstance(value, str)):
                self.check_classes(value, key)
            return
        if not isinstance(value, dict) or "class_path" in value:  # another class keeps only some arguments
            self.given = {known: given for known, given in self.given.items() if not known.startswith(f"{key}.")}
        if isinstance(value, dict):
            self.check_spec(value, [], key)
        elif value is not None:
            is_name = isinstance(value, str) and not Path(value).is_file()
            self.has_foreign_modules |= not is_name
            self.classes[key] = self.find_class(str(value), [], key) if is_name else None

    def check_classes(self, value: object, key: str) -> None:
        """Raise a ConfigError for an unknown class name, at any depth, in a value whose type hint is not known."""
        place = place_of(key)
        if isinstance(value, list):
            for i, item in enumerate(value):
                self.check_classes(item, f"{key}[{i}]")
        elif isinstance(value, dict):
            for name, item in value.items():
                self.check_classes(item, f"{key}.{name}")
        elif isinstance(value, str) and (place in BASES or key.endswith(".class_path")) and not Path(value).is_file():
            self.find_class(value, [], key)

    def find_class(self, path: str, bases: list[type], key: str) -> str | None:
        """Return the dotted path of a class of this package; None for one of another package, which is not read.

        Args:
            path: the class's dotted path, or its bare name, which is looked up in the package for the section ``key``.
            bases: classes of which it has to be a subclass, which is not checked here.
            key: the key of the configuration that names the class.

        Raises:
            ConfigError: the class should be in this package, and no module has it.
        """
        place = place_of(key)
        base, package = BASES.get(place, ""), PACKAGES.get(place)
        if "." in path:
            self.check_path(path, key, base)
        dotted = path if "." in path else f"{package}.{path}"
        if package is not None and dotted.startswith(f"{package}."):
            with suppress(LookupError):
                module, _ = find_source(dotted)
                if module.startswith(f"{package}."):
                    return dotted
        if base and "." not in path:
            self.check_name(path, key, base)
        return None

    def check_path(self, path: str, key: str, base: str) -> None:
        """Raise a ConfigError for a dotted path to a missing name in this package; record paths to other packages."""
        module, _, name = path.rpartition(".")
        first = path.partition(".")[0]
        if first != "rlightning":
            is_near = bool(get_close_matches(first, ["rlightning"], cutoff=0.8)) and not self.has_foreign_modules
            if is_near and find_spec(first) is None and PathFinder.find_spec(first, [os.getcwd()]) is None:
                raise no_module(key, first, [])
            self.has_foreign_modules |= first != "lightning"
            return
        missing = find_missing_module(module)
        if missing is not None:
            raise no_module(key, missing, map(str, find_folders(missing.rpartition(".")[0])))
        with suppress(LookupError):  # a folder without an __init__ cannot be searched
            if not has_name(module, name):
                names = class_names(module)
                fitting = names & subclass_names(base.rpartition(".")[2]) if base else names
                raise no_name(key, path, fitting or names)

    def check_name(self, name: str, key: str, base: str) -> None:
        """Raise a ConfigError if a class name without a module is that of no known subclass of ``base``."""
        names = subclass_names(base.rpartition(".")[2])
        if name not in names and not self.has_foreign_modules and name not in imported_names(base):
            raise no_class(key, name, [known for known in names if not known.startswith("_")])

    def parameters_of(self, kind: object) -> Parameters:
        """Return the type hints, by name, of the arguments of the class with the dotted path ``kind``."""
        return parameters_of_source(str(kind))

    def check_given(self) -> None:
        """Raise a ConfigError for a wrong stored value; strategies are skipped if a user's module may register some."""
        for key, given in self.given.items():
            if key == REWARDS:
                check_rewards(given.value)
            elif key != KEY:
                check_by_parser(key, given)
            elif not self.has_foreign_modules:
                check_strategy_name(given.value)


def check_early(command: str, options: list[str]) -> None:
    """Raise a ConfigError, with the full parser's message, for a key or a value that the parser would reject."""
    if asks_for_help(options):
        return
    try:
        keys = SourceKeys(keys_of(command), USUAL_CLASSES)
    except LookupError:  # this version of Lightning has other file names
        return
    keys.check_options(spell_out_options(options))
    check_model(keys)
    keys.check_given()


def keys_of(command: str) -> Parameters:
    """Return the keys that a command's configuration may have, with their type hints; None for an unknown hint."""
    given = {k: hint for k, hint in parameters_of_source(TRAINER, command).items() if k not in SET_BY_SECTIONS}
    own = {"output": str | None} if command == "predict" else {}
    names = ["config", "environment", "print_config", *PACKAGES]
    return {
        **dict.fromkeys(names),
        "seed_everything": bool | int,
        **given,
        **own,
        "trainer": parameters_of_source(TRAINER),
    }


def place_of(key: str) -> str:
    """Return a key without ``.class_path`` and list index: ``trainer.callbacks`` for ``trainer.callbacks[0]``."""
    return re.sub(r"\[\d+\]$", "", key.removesuffix(".class_path"))


def imported_names(base: str) -> set[str]:
    """Return the names of the class with the dotted path ``base`` and its subclasses; empty if it is not imported."""
    module, _, name = base.rpartition(".")
    kind = vars(sys.modules[module]).get(name) if module in sys.modules else None
    return {known.__name__ for known in subclasses(kind)} if kind is not None else set()
