"""Sizes of a model under one name each, whatever its config.json calls them.

transformers has ``hidden_size``, ``num_hidden_layers``, ``num_attention_heads`` and ``vocab_size`` for all. The sizes
below have other names in some, are left out by others, or differ from layer to layer.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedConfig

INNER_SIZES = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dff")
"""What architectures call the size of a dense feed-forward; GPT-2's n_inner may be None."""
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
NUM_ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k")
USUAL_FACTOR = 4
"""Of that size to the hidden size, where no name or no value is given."""


def head_size(config: PreTrainedConfig) -> int:
    """Return the size of a query's head, in the layer that has the largest."""
    text_config: Any = config.get_text_config()
    return max(_read_all(config, ["head_dim"]), default=text_config.hidden_size // text_config.num_attention_heads)


def num_key_value_heads(config: PreTrainedConfig) -> int:
    """Return how many key/value heads a layer has, the layer that has most."""
    text_config: Any = config.get_text_config()
    return max(_read_all(config, ["num_key_value_heads"]), default=text_config.num_attention_heads)


def cached_numbers(config: PreTrainedConfig, tensor_parallel_size: int = 1) -> int:
    """Return how many numbers a layer's KV cache holds of a token, on one of the ranks that split the layer.

    Latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) caches one compressed vector, whole on each rank.
    """
    text_config: Any = config.get_text_config()
    latent = getattr(text_config, "kv_lora_rank", None)
    if latent:
        return int(latent + text_config.qk_rope_head_dim)
    return 2 * max(num_key_value_heads(config) // tensor_parallel_size, 1) * head_size(config)


def inner_size(config: PreTrainedConfig) -> int:
    """Return the size between the two halves of a feed-forward, in the layer that has the widest."""
    text_config: Any = config.get_text_config()
    return max(_read_all(config, INNER_SIZES), default=USUAL_FACTOR * text_config.hidden_size)


def num_experts(config: PreTrainedConfig) -> int:
    """Return how many experts a router chooses from; 0 in a dense model."""
    return max(_read_all(config, NUM_EXPERTS), default=0)


def num_active_experts(config: PreTrainedConfig) -> int:
    """Return how many of them a token goes through; 0 in a dense model."""
    return max(_read_all(config, NUM_ACTIVE_EXPERTS), default=0) if num_experts(config) else 0


def is_set_for_all_layers(config: Any, name: str) -> bool:
    """Return whether a config has a value of this name, the same for all layers."""
    try:
        return getattr(config, name, None) is not None
    except RuntimeError:  # transformers' answer where layers differ and have configs of their own
        return False


def _read_all(config: PreTrainedConfig, names: Sequence[str]) -> list[int]:
    """Return the values that layers have under any of some names, where they are not None or 0."""
    text_config: Any = config.get_text_config()
    parts = (text_config, getattr(text_config, "ffn_config", None))  # DBRX's feed-forward has a part of its own
    return [value for part in parts for name in names for value in _read_layers(part, name) if value]


def _read_layers(config: Any, name: str) -> Iterator[int | None]:
    """Yield an attribute as the layers have it: one value, one a layer in a list, or one in a layer's own config."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # transformers' answer where layers differ and have configs of their own
        yield from (getattr(layer, name, None) for layer in config.per_layer_config)
        return
    yield from value if isinstance(value, (list, tuple)) else (value,)
