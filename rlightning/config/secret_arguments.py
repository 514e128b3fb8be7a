"""Secrets in a configuration, such as a reward's ``api_key``: written to no file, and read from the environment.

A secret is recognized by its name, or by its place in a URL. A name is split into words: ``openaiApiKey`` is an API
key, ``answer_key`` and ``stop_token`` are not secrets. Numbers are never secrets.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import is_dataclass
from itertools import count
from typing import Any, NamedTuple, TypeVar, cast

from jsonargparse import Namespace

from rlightning.errors import ConfigError
from rlightning.foreign_text import hide, without_secrets
from rlightning.python_values import field_values, map_items

REFERENCE = re.compile(r"\$\{ENV:(\w+)\}")

_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")
_SECRET = re.compile(
    r"(?:^|_)(?:secrets?|passwords?|passwd|passphrase|passcode|pwd|credentials?|apikeys?|authorization|auth|bearer|"
    r"cookies?|jwt|key|tokens?|(?:api|access|secret|private|auth|service|client|judge|openai|anthropic|hf|wandb)_keys)$"
)
_OTHER = re.compile(
    r"(?:^|_)(?:answers?|columns?|dict|labels?|field|json|metric|name|prompt|question|reference|response|completion|"
    r"solution|row|sort|group|cache|primary|foreign|public|partition|index|result|score|output|input|text|stop|eos|bos|"
    r"pad|unk|sep|cls|mask|special|start|end|first|last|next|prev|think|thinking|image|audio|video|tool|separator|"
    r"delimiter|new|num|max|min|count|total|number|per|length|yes|no|true|false|positive|negative|correct|wrong|good|"
    r"bad|target|verdict|boxed|final|begin|open|close|call|function|role|assistant|system|turn|newline)_(?:key|tokens?)$"
)
"""Names that match the pattern above, but are no names of secrets."""

_PASSWORD = re.compile(r"(?<=://)([^\s/?#:@]*):([^\s/?#@]+)(?=@)")
_QUERY = re.compile(r"(?<=[?&])([\w.-]+)=([^\s&#]+)")

_NAMES_OF_OTHERS = ("columns", "validation")
"""Keys of mappings whose names come from the data."""


T = TypeVar("T")
Values = TypeVar("Values", bound=MutableMapping[str, Any])


class _Secret(NamedTuple):
    """A secret value, its key, and the name of the reward or class that it belongs to."""

    value: str
    name: str
    owner: str


def is_secret(name: str) -> bool:
    """Return whether a key of this name may contain a secret."""
    words = "_".join(_WORD.findall(name)).lower()
    return bool(_SECRET.search(words)) and not _OTHER.search(words)


def mask_secrets(config: T) -> tuple[T, dict[str, str]]:
    """Replace the secrets of a configuration with references to environment variables, such as ``${ENV:API_KEY}``.

    Texts with a reference are not changed. A variable has the name of the secret. If different secrets have the same
    name, the name of the reward or class is prepended, and a number is appended if necessary.

    Args:
        config: mappings, namespaces and lists; it is not modified.

    Returns:
        The configuration with references, and the secrets by the names of their variables.
    """
    secrets: list[_Secret] = []
    _replace(config, lambda secret: secrets.append(secret) or "")  # type: ignore[func-returns-value]
    taken = {found[1] for _, text in _texts(config) for found in REFERENCE.finditer(text)}
    names: dict[_Secret, str] = {}
    variables: dict[str, str] = {}
    for secret in secrets:
        is_unique = all(other.value == secret.value for other in secrets if other.name == secret.name)
        candidates = (name for name in _variables(secret, is_unique) if name not in taken)
        names[secret] = next(name for name in candidates if variables.get(name, secret.value) == secret.value)
        variables[names[secret]] = secret.value
    masked = _replace(config, lambda secret: f"${{ENV:{names[secret]}}}")
    return cast(T, masked), variables


def hide_secrets(variables: Mapping[str, str]) -> None:
    """Register secrets, so that messages and hyperparameters contain references in their place from now on."""
    hide({value: f"${{ENV:{name}}}" for name, value in variables.items()})


def conceal(values: Values) -> Values:
    """Return a copy of a mapping in which known secrets, in texts at any depth, are replaced by references.

    Args:
        values: texts, or mappings, lists, tuples and dataclasses of texts. Dataclasses become mappings, which a
            checkpoint can contain.
    """
    concealed = copy(values)
    concealed.update({name: _conceal(inner) for name, inner in values.items()})
    return concealed


def _conceal(value: object) -> object:
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, dict):
        return conceal(value)
    if is_dataclass(value) and not isinstance(value, type):
        return conceal(field_values(value))
    return type(value)(map(_conceal, value)) if type(value) is list or type(value) is tuple else value


def check_references(config: object, known: Mapping[str, str]) -> None:
    """Raise a ConfigError if a configuration refers to a variable that is neither set nor in ``known``.

    Args:
        config: mappings, namespaces and lists.
        known: values by name, which take precedence over the environment.

    Raises:
        ConfigError: names the key and the variable.
    """
    for key, text in _texts(config):
        for found in REFERENCE.finditer(text):
            _read_variable(found[1], key, known)


def resolve_secrets(value: T, where: str, known: Mapping[str, str] | None = None) -> T:
    """Return a value with each ``${ENV:NAME}`` in it replaced by the environment variable.

    Args:
        value: a text, or mappings, namespaces, lists and tuples of texts.
        where: where the value is used, for the error.
        known: values by name, which take precedence over the environment.

    Raises:
        ConfigError: a variable is not set.
    """

    def read(found: "re.Match[str]") -> str:
        return _read_variable(found[1], where, known or {})

    return map_items(lambda one: REFERENCE.sub(read, one) if isinstance(one, str) else one, value)


def _read_variable(name: str, where: str, known: Mapping[str, str]) -> str:
    value = known.get(name, os.environ.get(name))
    if value is None:
        raise ConfigError(f"{where}: the environment variable {name} is not set. Set it to the secret.")
    hide_secrets({name: value})
    return value


def read_key(variable: str | None, missing: str) -> str | None:
    """Return the API key in an environment variable, and mask it in all later messages; None without a variable.

    Args:
        variable: the variable's name.
        missing: message of the ConfigError that is raised if the variable is not set.
    """
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(missing)
    hide_secrets({variable: key})
    return key


def _replace(
    value: object, give: Callable[[_Secret], str], name: str = "", owner: str = "", *, inside: str = ""
) -> object:
    """Return a value with each secret replaced by the result of ``give``.

    Args:
        value: any part of a configuration.
        give: returns the replacement of a secret.
        name: the value's own key.
        owner: name of the reward or class to which the value belongs.
        inside: the secret key of a mapping or list around the value, in which every text is a secret; "" if none.
    """
    if isinstance(value, Mapping | Namespace):
        entries = vars(value) if isinstance(value, Namespace) else value
        owner = _owner(entries) or owner
        container = inside or (name if is_secret(name) else "")
        replaced = {
            key: inner
            if key in _NAMES_OF_OTHERS and name != "arguments"
            else _replace(inner, give, str(key), owner, inside=container)
            for key, inner in entries.items()
        }
        return Namespace(replaced) if isinstance(value, Namespace) else replaced
    if isinstance(value, list):
        return [_replace(inner, give, name, owner, inside=inside) for inner in value]
    if not isinstance(value, str) or not value or REFERENCE.search(value):
        return value
    if is_secret(name) or inside:
        full_name = name if is_secret(name) else f"{inside}_{name}"
        return give(_Secret(str(value), full_name, owner))
    if "://" not in value or re.search(r"\s", value):
        return value
    text = _PASSWORD.sub(lambda found: f"{found[1]}:{give(_Secret(found[2], f'{name}_password', owner))}", value)
    return _QUERY.sub(
        lambda found: f"{found[1]}={give(_Secret(found[2], found[1], owner))}" if is_secret(found[1]) else found[0],
        text,
    )


def _owner(entries: Mapping[str, object]) -> str:
    """Return the name of the reward or class that a mapping configures."""
    path = entries.get("name") or entries.get("function") or entries.get("class_path")
    return path.rpartition(".")[2] if isinstance(path, str) else ""


def _variables(secret: _Secret, is_unique: bool) -> Iterator[str]:
    """Yield possible names for a secret's variable, the best first; without its owner only if ``is_unique``."""
    name, owner = (re.sub(r"\W", "_", part).upper() for part in (secret.name, secret.owner))
    long_name = f"{owner}_{name}" if owner else name
    yield from (name, long_name) if is_unique else (long_name,)
    yield from (f"{long_name}_{number}" for number in count(2))


def _texts(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts in a configuration, each with its key."""
    if isinstance(value, str):
        yield key, value
    entries: Iterable[tuple[object, object]] = vars(value).items() if isinstance(value, Namespace) else ()
    entries = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else entries
    for name, inner in entries:
        nested = key if name == "init_args" else f"{key}.{name}" if key else str(name)
        yield from _texts(inner, nested)
