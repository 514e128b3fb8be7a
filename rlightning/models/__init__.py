"""The Hugging Face policy: loading, packed attention, log-probabilities without [T, V] logits, and export."""

from typing import TYPE_CHECKING

from rlightning.lazy import lazy_import

if TYPE_CHECKING:
    from rlightning.models.adapter import Adapter
    from rlightning.models.export import save_adapter, save_policy
    from rlightning.models.logprobs import packed_logprobs
    from rlightning.models.policy import load_config, load_policy, load_tokenizer
    from rlightning.models.rotary import describe_length_limit, max_model_length
    from rlightning.models.whole_policy import hold_as_computed

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

# An engine's process does not need the actor's code.
__getattr__ = lazy_import(
    __name__,
    {
        "Adapter": "adapter",
        "describe_length_limit": "rotary",
        "hold_as_computed": "whole_policy",
        "load_config": "policy",
        "load_policy": "policy",
        "load_tokenizer": "policy",
        "max_model_length": "rotary",
        "packed_logprobs": "logprobs",
        "save_adapter": "export",
        "save_policy": "export",
    },
)
