"""Finds a misspelled key before torch is imported, by the source of the classes that the keys belong to.

It checks the sections, and the keys directly in ``trainer``, ``model``, ``data`` and ``rollout`` where the class is the
package's own. All else passes. The parser checks every key with the classes themselves
(:mod:`rlightning.cli.config_keys`), by the same rules.
"""

from pathlib import Path
from typing import Any

from rlightning.cli.config_keys import ConfigKeys, asks_for_help, check_model
from rlightning.cli.source_parameters import find_source, parameters_of_source
from rlightning.cli.strategy_names import spell_out_options

TRAINER = "lightning.pytorch.trainer.trainer.Trainer"
PACKAGES = {"model": "rlightning.algorithms", "data": "rlightning.data", "rollout": "rlightning.callbacks"}
"""Where the classes are that a section may name."""
USUAL_CLASSES = {"data": "rlightning.data.PromptDataModule", "rollout": "rlightning.callbacks.VLLMRollout"}
SET_BY_SECTIONS = {"model", "train_dataloaders", "val_dataloaders", "dataloaders", "datamodule", "return_predictions"}
"""What the Trainer's methods take that no key sets."""


class SourceKeys(ConfigKeys):
    """Checks keys as ConfigKeys does, with the dotted paths of classes in place of the classes; None for any other."""

    def check_value(self, value: object, hint: object, key: str) -> None:
        """Check the keys of a section that stands for a class."""
        if key not in PACKAGES:
            return
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
        """Return the names that the class takes."""
        return dict.fromkeys(parameters_of_source(kind))


def check_early(command: str, options: list[str]) -> None:
    """Raise a ConfigError for a key that the whole parser would refuse, in the same words.

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


def keys_of(command: str) -> dict[str, Any]:
    """Return the sections of a command, and the Trainer's keys, which are below ``trainer``."""
    given = [name for name in parameters_of_source(TRAINER, command) if name not in SET_BY_SECTIONS]
    own = ["output"] if command == "predict" else []
    names = ["config", "environment", "print_config", "seed_everything", *PACKAGES, *given, *own]
    return {**dict.fromkeys(names), "trainer": dict.fromkeys(parameters_of_source(TRAINER))}
