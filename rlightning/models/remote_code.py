"""Models with their own Python code (``auto_map`` in config.json), which runs only if the user trusts it.

Otherwise transformers would ask at the terminal during a run.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from rlightning.errors import ConfigError
from rlightning.protocols import has

T = TypeVar("T")

TRUST = "trust_remote_code"
"""The name of transformers' argument, which its errors mention, and of this package's key."""


class _TrustsRemoteCode(Protocol):
    """A module that declares whether its model's own Python code may run."""

    @property
    def trust_remote_code(self) -> bool: ...


def read_config(model: str, *, trust_remote_code: bool) -> PreTrainedConfig:
    """Return a model's configuration. With ``trust_remote_code``, also register the model's own classes, so that all
    later loads in this process use them.

    Raises:
        ConfigError: the model needs its own code, which is not trusted.
        OSError, ValueError: transformers cannot read it.
    """
    config: PreTrainedConfig = _load(AutoConfig.from_pretrained, model, "config.json", trust_remote_code)
    own_classes = vars(config).get("auto_map") or {}
    if trust_remote_code and "AutoConfig" in own_classes:
        AutoConfig.register(config.model_type, type(config), exist_ok=True)
    if trust_remote_code and "AutoModelForCausalLM" in own_classes:
        policy_class: Any = get_class_from_dynamic_module(own_classes["AutoModelForCausalLM"], model)
        policy_class.config_class = type(config)
        AutoModelForCausalLM.register(type(config), policy_class, exist_ok=True)
    return config


def read_tokenizer(model: str, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Return a model's tokenizer; raise a ConfigError if it needs the model's own code, which is not trusted."""
    tokenizer: PreTrainedTokenizerBase = _load(
        AutoTokenizer.from_pretrained, model, "tokenizer_config.json", trust_remote_code
    )
    return tokenizer


def load_generation_config(model: str, config: PreTrainedConfig) -> GenerationConfig:
    """Read ``generation_config.json``; without the file, return the generation settings of ``config``."""
    try:
        return GenerationConfig.from_pretrained(model)
    except OSError:
        return GenerationConfig.from_model_config(config)


def trusts_remote_code(module: object) -> bool:
    """Return whether a Lightning module lets the model's own Python code run; False if it has no attribute
    ``trust_remote_code``.
    """
    return has(module, _TrustsRemoteCode) and module.trust_remote_code


def _load(read: Callable[..., T], model: str, file: str, trust_remote_code: bool) -> T:
    try:
        return read(model, trust_remote_code=trust_remote_code)
    except ValueError as error:
        if TRUST not in str(error):
            raise
        raise ConfigError(
            f"model='{model}' brings Python code of its own (auto_map in its {file}), which would run here. Set "
            f"model.{TRUST}: true if you trust it, or choose a model that transformers knows."
        ) from error
