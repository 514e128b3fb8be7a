"""The Hugging Face policy: loading, packed attention, log-probabilities without [T, V] logits, and export."""

from pkgutil import resolve_name
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlightning.models.adapter import Adapter
    from rlightning.models.export import save_adapter, save_policy
    from rlightning.models.logprobs import packed_logprobs
    from rlightning.models.policy import hold_as_computed, load_config, load_policy, load_tokenizer
    from rlightning.models.rotary import describe_length_limit, max_model_length

__all__ = [
    "Adapter",
    "describe_length_limit",
    "hold_as_computed",
    "load_config",
    "load_policy",
    "load_tokenizer",
    "max_model_length",
    "packed_logprobs",
    "save_adapter",
    "save_policy",
]

_MODULES = {
    "Adapter": "adapter",
    "describe_length_limit": "rotary",
    "max_model_length": "rotary",
    "packed_logprobs": "logprobs",
    "save_adapter": "export",
    "save_policy": "export",
}


def __getattr__(name: str) -> object:
    """Import a name on first access, since an engine's process does not need the actor's code."""
    if name in __all__:
        return resolve_name(f"{__name__}.{_MODULES.get(name, 'policy')}:{name}")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
