"""A model's sizes, numbers of weights and floating point operations, computed from its configuration alone.

transformers has ``hidden_size``, ``num_hidden_layers``, ``num_attention_heads`` and ``vocab_size`` for all models. The
other sizes have various names, may be missing, or differ from layer to layer.

A matrix product of [M, K] and [K, N] has ``2 M K N`` operations. Other operations (norms, activations, softmax, rotary
positions) and recomputation are not counted, so that the numbers do not depend on the implementation (PaLM,
arXiv:2204.02311, appendix B). For a sequence of ``L`` tokens, for ``M`` of which the output layer is computed:

    forward  = 2 W L + 2 E V M + sum over layers of 2 H (Dk + Dv) S(L)
    training = 3 forward

``W``: weights of all matrices by which a token is multiplied in the layers, with only active experts; not the
embedding, which is a lookup. ``E V``: hidden size times vocabulary, of the output layer, tied or not. ``H, Dk, Dv``:
query heads, and the sizes of a key and a value. ``S(L)``: pairs of a token and a token that it attends to, itself
included: ``L (L + 1) / 2``, and with a window of ``w < L`` tokens ``w (w + 1) / 2 + (L - w) w``.

A backward pass has two products for each of the forward's: for the gradients of inputs and of weights. With an adapter
the second product is left out for the frozen base. With ``P`` weights of the adapter:

    training = 2 (2 W L + 2 E V M) + 3 (2 P L + sum over layers of 2 H (Dk + Dv) S(L))
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rlightning.models.layers import decoder_layers
from rlightning.parallel.sharding import named_weights

P = ParamSpec("P")
R = TypeVar("R")
INNER_SIZES = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dff")
"""Names of the size of a dense feed-forward in models' configurations; GPT-2's n_inner may be None."""
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
NUM_ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k")
USUAL_FACTOR = 4
"""Ratio of the feed-forward size to the hidden size, if the configuration does not have the size."""


def cache_by_config(
    function: Callable[Concatenate[PreTrainedConfig, P], R],
) -> Callable[Concatenate[PreTrainedConfig, P], R]:
    """Return a function that caches the results of ``function`` by the content of a model's configuration and by its
    other, hashable arguments.
    """
    results: dict[Hashable, R] = {}

    @wraps(function)
    def find(config: PreTrainedConfig, /, *args: P.args, **kwargs: P.kwargs) -> R:
        key = (config.to_json_string(use_diff=False), args, *sorted(kwargs.items()))
        if key not in results:
            results[key] = function(config, *args, **kwargs)
        return results[key]

    return find


def can_count(config: PreTrainedConfig) -> bool:
    """Return whether transformers has the architecture as a causal language model: :func:`count_weights` needs it."""
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING


@cache_by_config
def build_empty(config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model on the meta device, without memory for weights. The model is cached: callers must not modify it."""
    with torch.device("meta"):
        policy: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return policy


# Sizes


def read_setting(config: PreTrainedConfig, name: str, default: object = None) -> Any:
    """Return a value of a model's configuration that some architectures lack; ``default`` if it is missing."""
    return getattr(config.get_text_config(), name, default)


def head_size(config: PreTrainedConfig) -> int:
    """Return the size of an attention head, the largest over all layers."""
    text_config = config.get_text_config()
    return max(_read_all(config, ["head_dim"]), default=text_config.hidden_size // text_config.num_attention_heads)


def num_key_value_heads(config: PreTrainedConfig) -> int:
    """Return the number of key/value heads of a layer, the largest over all layers."""
    return max(_read_all(config, ["num_key_value_heads"]), default=config.get_text_config().num_attention_heads)


def cached_numbers(config: PreTrainedConfig, tensor_parallel_size: int = 1) -> int:
    """Return how many numbers the KV cache stores for each token and layer, on one tensor-parallel rank.

    Latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) caches one compressed vector, replicated on each rank.
    """
    latent = read_setting(config, "kv_lora_rank")
    if latent:
        return int(latent + config.get_text_config().qk_rope_head_dim)
    return 2 * max(num_key_value_heads(config) // tensor_parallel_size, 1) * head_size(config)


def path_share(config: PreTrainedConfig, *, copies_all: bool = False) -> float:
    """Return how much memory, at most, a token of a shared prefix takes for each sequence after the first, as a share
    of what layers keep for the backward pass of one token.

    Layers with a window copy the token's key and value for each sequence, and with ``copies_all`` all layers do. Layers
    keep at least key, value, query, the result of attention, four hidden states and three inner states of the
    feed-forward.
    """
    text_config = config.get_text_config()
    heads, hidden_size = int(text_config.num_attention_heads), int(text_config.hidden_size)
    cached = 2 * num_key_value_heads(config) * head_size(config)
    others = 2 * heads * head_size(config) + 4 * hidden_size
    num_layers = dict(count_windows(config))
    copying = 1.0 if copies_all else 1 - num_layers.get(None, 0) / sum(num_layers.values())
    return copying * cached / (cached + others + 3 * inner_size(config))


def inner_size(config: PreTrainedConfig) -> int:
    """Return the width of the feed-forward's hidden layer, the largest over all layers."""
    return max(_read_all(config, INNER_SIZES), default=USUAL_FACTOR * config.get_text_config().hidden_size)


def num_experts(config: PreTrainedConfig) -> int:
    """Return the number of experts of a mixture-of-experts layer; 0 in a dense model."""
    return max(_read_all(config, NUM_EXPERTS), default=0)


def num_active_experts(config: PreTrainedConfig) -> int:
    """Return the number of experts that process each token; 0 in a dense model."""
    return max(_read_all(config, NUM_ACTIVE_EXPERTS), default=0) if num_experts(config) else 0


def _read_all(config: PreTrainedConfig, names: Sequence[str]) -> list[int]:
    """Return the values under these names in a configuration and in those of its layers, without None and 0."""
    own = read_setting(config, "ffn_config")  # DBRX has a separate config for the feed-forward
    parts = [config, own] if isinstance(own, PreTrainedConfig) else [config]
    return [value for part in parts for name in names for value in _read_layers(part, name) if value]


def _read_layers(config: PreTrainedConfig, name: str) -> Iterator[int | None]:
    """Yield a configuration value for each layer: from a single value, a list, or each layer's own configuration."""
    try:
        value = read_setting(config, name)
    except RuntimeError:  # raised by transformers if layers have different configs
        yield from (read_setting(layer, name) for layer in read_setting(config, "per_layer_config"))
        return
    yield from value if isinstance(value, (list, tuple)) else (value,)


# Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The numbers of weights of a model and of one rank's part of it, not bytes; tied weights count once.

    Attributes:
        total: all weights of the model.
        held: weights on the rank that has the most.
        layer: weights of the largest layer, on a tensor-parallel rank.
        layers: weights of all layers, on a tensor-parallel rank.
        root: weights of embedding, last norm and output layer, on a tensor-parallel rank.
        head: weights of the output layer, on a tensor-parallel rank.
        largest: weights of the largest tensor.
        is_tied: whether the output layer is the embedding.
        shapes: names and full shapes, in the order in which weights are sent to an engine.
    """

    total: int
    held: int
    layer: int
    layers: int
    root: int
    head: int
    largest: int
    is_tied: bool
    shapes: tuple[tuple[str, tuple[int, ...]], ...]


@cache_by_config
def count_weights(config: PreTrainedConfig, *, tensor_parallel_size: int = 1, shard_size: int = 1) -> Weights:
    """Return the numbers of weights of a model, and of a rank's part of it.

    ``tensor_parallel_size`` ranks split each layer, by transformers' plan for the model; ``shard_size`` ranks split the
    first dimension of every remaining tensor (FSDP2).
    """
    policy = build_empty(config)
    plan = (config.get_text_config().base_model_tp_plan or {}) if tensor_parallel_size > 1 else {}
    embedding, head = policy.get_input_embeddings(), policy.get_output_embeddings()
    assert embedding is not None and head is not None
    names = {id(parameter): name for name, parameter in policy.base_model.named_parameters()}
    parts = {}
    for parameter in policy.parameters():
        module, _, kind = names.get(id(parameter), "").rpartition(".")
        is_vocabulary = parameter is embedding.weight or parameter is head.weight
        planned = next((style for pattern, style in plan.items() if matches_plan(module, pattern)), "")
        style = "colwise" if is_vocabulary else planned
        parts[id(parameter)] = _cut(tuple(parameter.shape), style, kind, tensor_parallel_size)
    layers = [sum(math.prod(parts[id(p)]) for p in layer.parameters()) for layer in decoder_layers(policy)]
    return Weights(
        total=sum(parameter.numel() for parameter in policy.parameters()),
        held=sum(-(-shape[0] // shard_size) * math.prod(shape[1:]) for shape in parts.values()),
        layer=max(layers),
        layers=sum(layers),
        root=sum(math.prod(shape) for shape in parts.values()) - sum(layers),
        head=math.prod(parts[id(head.weight)]),
        largest=max(parameter.numel() for parameter in policy.parameters()),
        is_tied=head.weight is embedding.weight,
        shapes=tuple((name, tuple(tensor.shape)) for name, tensor in named_weights(policy)),
    )


def matches_plan(module: str, pattern: str) -> bool:
    """Return whether a module's name matches ``pattern``, a key of a tensor-parallel plan, in which ``*`` stands for a
    layer's number.
    """
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), module) is not None


def _cut(shape: tuple[int, ...], style: str, kind: str, size: int) -> tuple[int, ...]:
    """Return the shape of a tensor-parallel rank's part of a weight or bias (``kind``) with this shape."""
    if style.startswith("colwise"):
        return (-(-shape[0] // size), *shape[1:])
    if style.startswith("rowwise") and kind == "weight":
        return (shape[0], -(-shape[1] // size))
    return shape


# Operations


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """The sizes of a model from which the floating point operations of a sequence are computed, by the formula at the
    top of this file.

    Attributes:
        matrices: ``W``.
        head: ``E V``.
        pair: ``2 H (Dk + Dv)``, of one layer.
        windows: pairs of a window in tokens (None for full attention) and the number of layers with it.
    """

    matrices: int
    head: int
    pair: int
    windows: tuple[tuple[int | None, int], ...]


def sequence_flops(
    config: PreTrainedConfig, lengths: Tensor, predicted: Tensor | None = None, *, adapter_weights: int = 0
) -> Tensor:
    """Return the floating point operations of forward and backward over each sequence: [N] float64, on the device of
    ``lengths``.

    Args:
        config: the model's configuration.
        lengths: [N], tokens of each sequence.
        predicted: [N], number of tokens for which the output layer is computed; None for all.
        adapter_weights: ``P``, the number of weights of the adapter, which alone is trained; 0 without an adapter.
    """
    sizes, lengths = model_flops(config), lengths.double()
    predicted = lengths if predicted is None else predicted.double()
    model = 2.0 * sizes.matrices * lengths + 2.0 * sizes.head * predicted
    others = 2.0 * adapter_weights * lengths
    for window, num_layers in sizes.windows:
        others += float(sizes.pair * num_layers) * visible_pairs(lengths, window)
    return (2 if adapter_weights else 3) * model + 3 * others


def visible_pairs(lengths: Tensor, window: int | None) -> Tensor:
    """Return the number of query-key pairs of causal attention in each sequence, [N], for lengths [N] and a window in
    tokens; None for full attention.
    """
    seen = lengths if window is None else lengths.clamp(max=window)
    return seen * (seen + 1) / 2 + (lengths - seen) * seen


@cache_by_config
def model_flops(config: PreTrainedConfig) -> ModelFlops:
    """Return the sizes of a causal language model from which its floating point operations are computed."""
    policy = build_empty(config)
    head = policy.get_output_embeddings()
    assert head is not None
    heads: int = config.get_text_config().num_attention_heads
    # Keys and values of latent attention (DeepSeek-V2, arXiv:2405.04434) have different sizes.
    sizes = [read_setting(config, name) or head_size(config) for name in ("qk_head_dim", "v_head_dim")]
    share = num_active_experts(config) / num_experts(config) if num_experts(config) else 1.0
    matrices = [
        (name, parameter)
        for prefix, module in policy.named_modules()
        if not isinstance(module, nn.Embedding) and module is not head and "norm" not in prefix.rpartition(".")[2]
        for name, parameter in module.named_parameters(prefix, recurse=False)
        if parameter.ndim > 1 and not name.endswith("bias")
    ]
    return ModelFlops(
        # Shared experts are always active, and have another name.
        matrices=round(sum(p.numel() * (share if "experts" in name.split(".") else 1) for name, p in matrices)),
        head=head.weight.numel(),
        pair=2 * heads * sum(sizes),
        windows=count_windows(config),
    )


def count_windows(config: PreTrainedConfig) -> tuple[tuple[int | None, int], ...]:
    """Return pairs of a sliding window's size in tokens (None for full attention) and the number of layers with it."""
    window: int | None = read_setting(config, "sliding_window")
    # Without layer types, the window applies to all layers.
    kinds = read_setting(config, "layer_types") or ["sliding_attention"] * config.get_text_config().num_hidden_layers
    return tuple(Counter(window if kind == "sliding_attention" else None for kind in kinds).items())
