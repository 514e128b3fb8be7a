"""Finds a wrong key or value before torch is imported, by the source of the classes that the keys belong to.

It checks the sections, and what stands directly in ``trainer``, ``model``, ``data`` and ``rollout`` where the class is
the package's own; values where the source has their type (:mod:`rlightning.cli.source_parameters`). All else passes.
The parser checks everything with the classes themselves (:mod:`rlightning.cli.config_keys`), by the same rules.
"""

import os
from argparse import ArgumentError
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from rlightning.cli.config_keys import ConfigKeys, asks_for_help, check_model
from rlightning.cli.parser_messages import summarise
from rlightning.cli.source_parameters import find_source, parameters_of_source
from rlightning.cli.strategy_names import spell_out_options
from rlightning.errors import ConfigError

TRAINER = "lightning.pytorch.trainer.trainer.Trainer"
PACKAGES = {"model": "rlightning.algorithms", "data": "rlightning.data", "rollout": "rlightning.callbacks"}
"""Where the classes are that a section may name."""
USUAL_CLASSES = {"data": "rlightning.data.PromptDataModule", "rollout": "rlightning.callbacks.VLLMRollout"}
SET_BY_SECTIONS = {"model", "train_dataloaders", "val_dataloaders", "dataloaders", "datamodule", "return_predictions"}
"""What the Trainer's methods take that no key sets."""


@dataclass
class GivenValue:
    """What a key is set to.

    Attributes:
        value: as the file has it, or an option's text.
        hint: of the key's type.
        is_option: whether the command line has it, whose texts may stand for other values.
    """

    value: object
    hint: object
    is_option: bool = False

    def check(self, key: str) -> None:
        """Raise a ConfigError if the parser would refuse the value."""
        if isinstance(self.value, str) and os.path.exists(os.path.expanduser(self.value)):  # its content may be meant
            return
        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument("--value", type=self.hint)
        try:
            if self.is_option:
                parser.parse_args([f"--value={self.value}"])
            else:
                parser.parse_object({"value": self.value})
        except ArgumentError as error:
            raise ConfigError(summarise(str(error).replace('"value"', f'"{key}"', 1), None)) from error


class SourceKeys(ConfigKeys):
    """Checks keys as ConfigKeys does, with the dotted paths of classes in place of the classes; None for any other.

    Attributes:
        given: by key, the value that it was set to last; only what is known for sure.
    """

    def __init__(self, parameters: dict[str, Any], classes: Mapping[str, Any]) -> None:
        super().__init__(parameters, classes)
        self.given: dict[str, GivenValue] = {}

    def check_option(self, key: str, text: str) -> None:
        """Check one key that the command line sets."""
        super().check_option(key, text)
        given = self.given.get(plain_key(key))
        if given:
            given.value, given.is_option = text, True

    def check_mapping(self, values: Mapping[str, Any], parameters: dict[str, Any], where: str) -> None:
        """Check keys, and note what they are set to."""
        super().check_mapping(values, parameters, where)
        for name, value in values.items():
            first = name.partition(".")[0].removesuffix("+")
            hint = parameters[first]
            key = plain_key(f"{where}.{first}" if where else first)
            if name == first and hint is not None and not isinstance(hint, dict):
                self.given[key] = GivenValue(value, hint)
            else:  # a type that is not known, a section, or a part of a value
                self.given.pop(key, None)

    def check_value(self, value: object, hint: object, key: str) -> None:
        """Check the keys of a section that stands for a class, and what stands for null."""
        if key not in PACKAGES:
            if hint is not None:
                super().check_value(value, hint, key)
            return
        if not isinstance(value, dict) or "class_path" in value:  # a class does not keep all that another was given
            self.given = {known: given for known, given in self.given.items() if not known.startswith(f"{key}.")}
        if isinstance(value, dict):
            self.check_spec(value, [], key)
        elif value is not None:
            self.classes[key] = None if Path(str(value)).is_file() else self.find_class(str(value), [], key)

    def find_class(self, path: str, bases: list[type], key: str) -> Any:
        """Return the dotted path of a class of the section's package, which may be given by its bare name, or None."""
        package = PACKAGES[key.removesuffix(".class_path")]
        dotted = path if "." in path else f"{package}.{path}"
        if not dotted.startswith(f"{package}."):
            return None
        try:
            module, _ = find_source(dotted)
        except LookupError:
            return None
        return dotted if module.startswith(f"{package}.") else None

    def parameters_of(self, kind: str) -> dict[str, Any]:
        """Return what the class takes."""
        return parameters_of_source(kind)

    def check_given(self) -> None:
        """Check the values."""
        for key, given in self.given.items():
            given.check(key)


def check_early(command: str, options: list[str]) -> None:
    """Raise a ConfigError for a key or a value that the whole parser would refuse, in the same words.

    Args:
        command: such as ``fit``.
        options: what follows it.
    """
    if asks_for_help(options):
        return
    try:
        keys = SourceKeys(keys_of(command), USUAL_CLASSES)
    except LookupError:  # another version of Lightning, with other files
        return
    keys.check_options(spell_out_options(options))
    check_model(keys)
    keys.check_given()


def keys_of(command: str) -> dict[str, Any]:
    """Return the sections of a command, and the Trainer's keys, which are below ``trainer``; with hints if known."""
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


def plain_key(key: str) -> str:
    """Return a key without the level that a class's arguments have in a file."""
    return key.replace(".init_args.", ".")
