"""The prompt sets of validation, in all forms in which a configuration can give them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlightning.config.argument_checks import checked
from rlightning.data.in_memory import PromptSource, check_source, paths_of
from rlightning.errors import ConfigError, check_rules, did_you_mean


@checked
@dataclass(frozen=True)
class ValidationSet:
    """A prompt set for validation, with its settings.

    Attributes:
        path: as for ``PromptDataModule(train=...)``: files, or rows in memory.
        limit: use only this many rows, from the start.
        samples_per_prompt: completions of each prompt; k of pass@k.
        temperature: sampling temperature; None for 0 (greedy) with one completion a prompt, else 1.
        prompt_column: None for the data module's.
        prompt_template: None for the data module's.
        environment: name of the environment for rows that name none, in a run with several; None for the data module's.
        name: the set's name in the metrics ``val/<name>/...``; set by the data module from the key.
    """

    path: PromptSource
    limit: int | None = None
    samples_per_prompt: int = 1
    temperature: float | None = None
    prompt_column: str | None = None
    prompt_template: str | None = None
    environment: str | None = None
    name: str = ""

    @property
    def key(self) -> str:
        """The set's key in the configuration, for error messages."""
        return f"data.validation.{self.name}"

    def resolve(self, name: str) -> "ValidationSet":
        """Return the set with its default name and temperature; raises a ConfigError if a setting is invalid."""
        check_source(self.path, f"data.validation.{name}")
        start, limit, samples = f"Validation set '{name}':", self.limit, self.samples_per_prompt
        default = 0.0 if samples == 1 else 1.0
        temperature = default if self.temperature is None else self.temperature
        alike = f"{start} samples_per_prompt={samples} at temperature=0 are all alike. Use a temperature above 0"
        check_rules(
            {
                f"{start} samples_per_prompt={samples} must be at least 1": samples >= 1,
                f"{start} limit={limit} must be at least 1. Leave it out for all rows": limit is None or limit >= 1,
                alike: temperature != 0 or samples == 1,
            }
        )
        return replace(self, name=name, temperature=temperature)


Settings = Mapping[str, Any]
"""The arguments of a :class:`ValidationSet` by name, as in a configuration."""

if TYPE_CHECKING:
    ValidationSource = Mapping[str, ValidationSet | Settings | PromptSource] | ValidationSet | PromptSource
    """Sets by name, or a single set; see :func:`make_validation_sets`."""
else:  # the types that a configuration file can express, to which jsonargparse converts
    ValidationSource = dict[str, ValidationSet | PromptSource] | PromptSource

_KEYS = [field.name for field in fields(ValidationSet) if field.name != "name"]


def make_validation_sets(given: "ValidationSource | None") -> list[ValidationSet]:
    """Convert the argument ``validation`` of ``PromptDataModule`` to a list of sets.

    The argument may be None, one set, a list of paths, each of which is a set, or sets by name. A set is a source of
    prompts, a :class:`ValidationSet`, or a mapping of its keys. Raises a ConfigError for anything else.
    """
    if given is None:
        return []
    if isinstance(given, Mapping):
        if "path" in given and set(given) <= set(_KEYS):
            raise ConfigError(
                f"data.validation has the keys of one set: {', '.join(given)}. Write them below a name for it: "
                "{test: {path: ...}}."
            )
        named = [(str(name), _to_set(chosen, str(name))) for name, chosen in given.items()]
    elif isinstance(given, list | tuple) and paths_of(given):
        named = [(_name_of(path), ValidationSet(path)) for path in paths_of(given)]
    else:
        chosen = _to_set(given, "validation")
        named = [(chosen.name or _name_of(chosen.path), chosen)]
    names = [name for name, _ in named]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"data.validation has two sets of the name '{twice}'. Give each a name: {{{twice}: ...}}.")
    return [chosen.resolve(name) for name, chosen in named]


def _to_set(chosen: "ValidationSet | Settings | PromptSource", name: str) -> ValidationSet:
    if isinstance(chosen, ValidationSet):
        return chosen
    if not isinstance(chosen, Mapping):
        return ValidationSet(chosen)
    unknown = next((key for key in chosen if key not in _KEYS), None)
    if unknown is not None:
        raise ConfigError(f"data.validation.{name}.{unknown}: there is no such key. {did_you_mean(unknown, _KEYS)}")
    if "path" not in chosen:
        raise ConfigError(f"data.validation.{name}: its path is missing. Give a file, or rows.")
    return ValidationSet(**chosen)


def _name_of(source: object) -> str:
    """Return the name of a set given by its path: "test" for data/test.jsonl, "gsm8k" for openai/gsm8k:main:test."""
    return Path(str(source).split(":")[0]).stem if isinstance(source, str | Path) else "validation"
