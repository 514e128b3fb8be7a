"""Checks that a Hugging Face model can be trained: the features that its class declares, then its results.

transformers passes any attention function to any model. Models that also mix tokens in other ways (a recurrent state, a
convolution, a bias on attention scores) would run, but leak information between packed sequences.
"""

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from rlightning.errors import ConfigError
from rlightning.foreign_text import cut_value, describe_error
from rlightning.models.attention import PACKED_ATTENTION, packed_inputs
from rlightning.models.counts import (
    build_empty,
    cache_by_config,
    head_size,
    num_experts,
    num_key_value_heads,
    read_setting,
)
from rlightning.models.finite import find_not_finite
from rlightning.models.output_layer import scale_logits
from rlightning.models.rotary import scaled_ropes
from rlightning.models.transformers_internals import is_stateful, supports_attention_backend, supports_sdpa
from rlightning.parallel.device import exact_float32
from rlightning.parallel.sharding import named_weights
from rlightning.types.shared_prefixes import find_prefixes, share_prefixes

_LAYER_TYPES = {"full_attention", "sliding_attention"}
ROUNDING, HALF_ROUNDING = 1e-3, 0.05
"""Allowed difference between two computations of the same result, relative to its norm, in float32 and in bfloat16."""
BUILD_ERRORS = (ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors that transformers raises for contradictory or unknown values in config.json."""
_WAY_OUT = "Choose a model that mixes tokens by plain causal attention, such as Qwen3 or Llama."


def check_config(model: str, config: PreTrainedConfig) -> None:
    """Raise a ConfigError if a model cannot be trained: it is no causal language model, is quantised, or has a feature
    that packed sequences or log-probabilities in chunks do not support.

    The message names the feature. Weights are not needed.
    """
    try:
        cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError as error:
        raise ConfigError(f"model='{model}' ({config.model_type}) is no causal language model. {_WAY_OUT}") from error
    quantization = vars(config).get("quantization_config") or read_setting(config, "quantization_config")
    if quantization is not None:
        raise ConfigError(
            f"model='{model}' is quantized (quantization_config={cut_value(quantization)} in its "
            "config.json), and such weights cannot be trained. Use the unquantized model that it was made from."
        )
    other_layers = sorted(_layer_types(config) - _LAYER_TYPES)
    scaled = [name for name in ("logits_scaling", "logit_scale") if read_setting(config, name, 1) not in (None, 1)]
    reason = None
    if other_layers:
        reason = f"it has layers of the type '{other_layers[0]}'"
    elif is_stateful(cls):
        reason = "its layers carry a recurrent state from token to token"
    elif read_setting(config, "attn_logit_softcapping") is not None:
        reason = "it caps attention scores (attn_logit_softcapping)"
    elif not supports_sdpa(cls):
        reason = "its attention adds to plain dot products (as attention sinks do)"
    elif not supports_attention_backend(cls):
        reason = "its transformers class takes no attention function"
    elif noise := read_setting(config, "router_jitter_noise"):
        reason = f"its router draws random numbers (router_jitter_noise={noise})"
    elif scaled:
        reason = f"its config has {scaled[0]}"
    if reason:
        raise _refusal(model, config, reason)
    try:
        build_empty(config)
    except BUILD_ERRORS as error:
        raise ConfigError(
            f"model='{model}' ({config.model_type}) cannot be built from its config.json: {describe_error(error)}."
        ) from error


@torch.no_grad()
@exact_float32()
def check_policy(model: str, policy: PreTrainedModel) -> None:
    """Run two short sequences packed and separately; raise a ConfigError if the results differ.

    Skipped in half precision, and computed without TF32, whose rounding errors would hide a difference.
    """
    config = policy.config
    head: Any = policy.get_output_embeddings()
    if head is None or "bias" in dict(head.named_parameters(recurse=False)):
        raise _refusal(model, config, "its output layer has a bias" if head is not None else "it has no output layer")
    if policy.dtype not in (torch.float32, torch.float64):
        return
    vocabulary = config.get_text_config().vocab_size
    tokens = torch.arange(1, 13, device=policy.device) % vocabulary
    first, second = tokens[:5], tokens[5:]
    try:
        both = _pack(first, second)
        hidden = policy.base_model(**both).last_hidden_state[0]
        alone = policy.base_model(**_pack(second)).last_hidden_state[0]
        logits = policy(**both).logits[0]
    except NotImplementedError as error:
        raise _refusal(model, config, str(error)) from error
    except BUILD_ERRORS as error:
        raise _refusal(model, config, f"it fails on them with {describe_error(error)}") from error
    if not bool(logits.isfinite().all()):
        raise not_finite(model, find_not_finite(named_weights(policy)))
    if not _agree(hidden[5:], alone):
        raise _refusal(model, config, "a sequence's result depends on the one packed before it")
    softcap = read_setting(config, "final_logit_softcapping")
    if not _agree(scale_logits(hidden @ head.weight.T, 1.0, softcap), logits):
        raise _refusal(model, config, "its logits are not its output layer times its last hidden states")


def not_finite(model: str, names: Sequence[str]) -> ConfigError:
    """Return a ConfigError which says that the weights ``names`` are NaN or infinite; without names, that the logits
    are, though all weights are finite.
    """
    found = "computes NaN or infinite logits from finite weights"
    if names:
        found = f"has NaN or infinite values in {len(names)} of its weights, such as '{names[0]}'"
    return ConfigError(f"model='{model}' {found}. Use another copy or an earlier checkpoint of it.")


@cache_by_config
def can_share_prefixes(config: PreTrainedConfig, device_type: str = "cpu") -> bool:
    """Return whether a prefix that several sequences share may be computed once: whether results and gradients of two
    small layers of the architecture stay the same up to rounding.

    False for models that mix tokens other than by attention, such as by convolutions or linear attention. On CUDA,
    bfloat16 is tested too, since it has its own kernel.
    """
    dtypes = [torch.float32, torch.bfloat16] if device_type == "cuda" else [torch.float32]
    try:
        # Independent of the dtype and device of an active strategy, and with gradients enabled. Active mixed precision
        # would round products of the backward pass, too.
        exact = torch.autocast(device_type, enabled=False)
        with torch.device("cpu"), torch.inference_mode(False), torch.enable_grad(), exact, exact_float32():
            policy = nn.Module.to(build_small(config), device_type)
            return all(_gives_the_same(policy, dtype) for dtype in dtypes)
    except BUILD_ERRORS:  # its code accepts no further arguments
        return False


def _gives_the_same(policy: PreTrainedModel, dtype: torch.dtype) -> bool:
    """Return whether logits and gradients are equal up to rounding with and without shared prefixes."""
    sequences = [torch.arange(3, 14), torch.tensor([3, 4, 5, 6, 7, 8, 40, 41]), torch.tensor([3, 4, 5, 50, 51, 52])]
    token_ids, lengths = torch.cat(sequences), [len(sequence) for sequence in sequences]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in lengths])
    shared = share_prefixes(bounds, find_prefixes(token_ids, bounds))
    device, weights = policy.device, torch.linspace(-1, 1, len(token_ids))[:, None]
    token_ids, positions, bounds = (part.to(device) for part in (token_ids, positions, bounds))
    results = []
    for how in (None, shared.to(device)):
        policy.zero_grad()
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            logits = policy(**packed_inputs(token_ids, positions, bounds, max(lengths), how)).logits[0]
        logits = (logits if how is None else logits[how.places]).float()
        (logits * weights.to(device)).square().sum().backward()
        gradients = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
        results.append((logits.detach(), torch.cat(gradients)))
    tolerance = ROUNDING if dtype == torch.float32 else HALF_ROUNDING
    return all(_agree(once, alone, tolerance) for alone, once in zip(*results, strict=True))


def build_small(config: PreTrainedConfig) -> PreTrainedModel:
    """Build two small layers of the same architecture with random weights, on the CPU. The config is not modified."""
    small = copy.deepcopy(config)
    text_config = small.get_text_config()
    heads = text_config.num_attention_heads
    per_head = head_size(config)  # a head keeps its size: positions are scaled by lists of that length
    sizes: dict[str, Any] = {
        "vocab_size": 128,
        "pad_token_id": 0,
        "num_hidden_layers": 2,
        "layer_types": (sorted(_layer_types(config)) * 2)[:2],
        "num_attention_heads": 2,
        "num_key_value_heads": 2 if num_key_value_heads(config) == heads else 1,
        "hidden_size": 2 * per_head,
        "intermediate_size": 4 * per_head,
        "moe_intermediate_size": per_head,
    }
    for name, value in sizes.items():
        with suppress(RuntimeError):  # raised by transformers if layers have different configs
            if read_setting(small, name) is not None:
                setattr(text_config, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # torch.manual_seed() would also seed CUDA, which is not restored
        policy: PreTrainedModel = AutoModelForCausalLM.from_config(
            small, dtype=torch.float32, attn_implementation=PACKED_ATTENTION
        )
    return policy


def describe_traits(config: PreTrainedConfig) -> list[str]:
    """Return short descriptions of an architecture, such as "latent attention", for an error that actor and engine
    disagree.
    """
    scaled = sorted({rope["rope_type"] for rope in scaled_ropes(config)})
    layers = sorted(_layer_types(config) - {"full_attention"})
    policy = build_empty(config)
    saved = {name.rpartition(".")[2] for name, _ in named_weights(policy)} - {
        name.rpartition(".")[2] for name, _ in policy.named_parameters()
    }
    conversions = get_model_conversion_mapping(policy, add_legacy=False)
    traits = {
        config.model_type: True,
        "its output layer is the embedding": config.get_text_config().tie_word_embeddings,
        f"rotary positions are scaled ({', '.join(scaled)})": scaled,
        f"layers of {', '.join(layers)}": layers,
        f"buffers are weights ({', '.join(sorted(saved))})": saved,
        "its weights are stored under other names or in other shapes than they run in": conversions,
        f"{num_experts(config)} experts": num_experts(config),
        "latent attention": read_setting(config, "kv_lora_rank"),
        "logits are capped": read_setting(config, "final_logit_softcapping"),
    }
    return [trait for trait, is_there in traits.items() if is_there]


def _layer_types(config: PreTrainedConfig) -> set[str]:
    return set(read_setting(config, "layer_types") or ())


def _pack(*sequences: torch.Tensor) -> dict[str, object]:
    """Return the arguments of a model's forward pass for several packed sequences of token ids."""
    lengths = [len(sequence) for sequence in sequences]
    bounds = torch.tensor([0, *lengths], device=sequences[0].device).cumsum(0).int()
    positions = torch.cat([torch.arange(length, device=bounds.device) for length in lengths])
    return packed_inputs(torch.cat(sequences), positions, bounds, max(lengths))


def _agree(got: torch.Tensor, expected: torch.Tensor, tolerance: float = ROUNDING) -> bool:
    """Return whether two results are equal up to rounding."""
    return bool((got - expected).norm() <= tolerance * expected.norm())


def _refusal(model: str, config: PreTrainedConfig, reason: str) -> ConfigError:
    return ConfigError(
        f"model='{model}' ({config.model_type}) cannot be trained on packed sequences: {reason}. {_WAY_OUT}"
    )
