"""Secrets among the arguments of reward functions: kept out of files, read from the environment when a run starts."""

import os
import re
from collections.abc import Mapping
from typing import Any

from rlightning.errors import ConfigError

_SECRET = re.compile(r"(?:^|[_-])(?:api_?key|key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{ENV:(\w+)\}")


def mask_secrets(config: Any) -> Any:
    """Return a configuration in which secret arguments of rewards are references to environment variables.

    Those are values whose name ends like a key's, such as ``api_key``, which becomes ``${ENV:API_KEY}``; one that is
    such a reference already stays. A run that goes on from the masked configuration takes the secret from there.
    """
    if isinstance(config, Mapping):
        return {
            name: _mask_arguments(value) if name == "arguments" else mask_secrets(value)
            for name, value in config.items()
        }
    return [mask_secrets(value) for value in config] if isinstance(config, list) else config


def resolve_secrets(value: Any, where: str) -> Any:
    """Return a value with environment variables in place of each ``${ENV:NAME}`` in it.

    Args:
        value: a text, or mappings and lists with some.
        where: what it belongs to, for the error.

    Raises:
        ConfigError: a variable is not set.
    """
    if isinstance(value, Mapping):
        return {name: resolve_secrets(inner, where) for name, inner in value.items()}
    if isinstance(value, list):
        return [resolve_secrets(inner, where) for inner in value]
    return _VARIABLE.sub(lambda found: _read_variable(found[1], where), value) if isinstance(value, str) else value


def _mask_arguments(value: Any, name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {inner: _mask_arguments(v, str(inner)) for inner, v in value.items()}
    if isinstance(value, list):
        return [_mask_arguments(inner, name) for inner in value]
    is_secret = value is not None and not isinstance(value, bool) and _SECRET.search(name)
    is_reference = isinstance(value, str) and _VARIABLE.fullmatch(value)
    variable = re.sub(r"\W", "_", name).upper()
    return f"${{ENV:{variable}}}" if is_secret and not is_reference else value


def _read_variable(name: str, where: str) -> str:
    if name not in os.environ:
        raise ConfigError(f"{where}: the environment variable {name} is not set. Set it to the secret.")
    return os.environ[name]
