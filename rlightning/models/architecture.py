"""Which Hugging Face models can be trained: what their classes declare, then what they do.

transformers hands any attention function to any model. Those that mix tokens in another way too (a recurrent state, a
convolution, a bias on attention scores) would run, and let each packed sequence see the one before it.
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from rlightning.errors import ConfigError
from rlightning.foreign_text import cut_value, describe_error
from rlightning.models.attention import PACKED_ATTENTION
from rlightning.models.output_layer import scale_logits
from rlightning.models.rotary import scaled_ropes
from rlightning.models.sizes import head_size, is_set_for_all_layers, num_experts, num_key_value_heads
from rlightning.parallel.sharding import local_tensor, named_weights

_LAYER_TYPES = {"full_attention", "sliding_attention"}
BUILD_ERRORS = (ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError)
"""That transformers raises for values in config.json that do not go together, or that it does not know."""
_WAY_OUT = "Choose a model that mixes tokens by plain causal attention, such as Qwen3 or Llama."


def check_config(model: str, config: PreTrainedConfig) -> None:
    """Refuse an architecture that declares something which packed sequences or fused log-probabilities lack.

    Args:
        model: its name, for the error.
        config: read, with no weight loaded yet.

    Raises:
        ConfigError: says what it is.
    """
    try:
        cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError as error:
        raise ConfigError(f"model='{model}' ({config.model_type}) is no causal language model. {_WAY_OUT}") from error
    text_config = config.get_text_config()
    for part in (config, text_config):
        if getattr(part, "quantization_config", None) is not None:
            raise ConfigError(
                f"model='{model}' is quantized (quantization_config={cut_value(part.quantization_config)} in its "
                "config.json), and such weights cannot be trained. Use the unquantized model that it was made from."
            )
    other_layers = sorted(set(getattr(text_config, "layer_types", None) or ()) - _LAYER_TYPES)
    scaled = [name for name in ("logits_scaling", "logit_scale") if getattr(text_config, name, 1) not in (None, 1)]
    reason = None
    if other_layers:
        reason = f"it has layers of the type '{other_layers[0]}'"
    elif cls._is_stateful:
        reason = "its layers carry a recurrent state from token to token"
    elif getattr(text_config, "attn_logit_softcapping", None) is not None:
        reason = "it caps attention scores (attn_logit_softcapping)"
    elif not cls._supports_sdpa:
        reason = "its attention adds to plain dot products (as attention sinks do)"
    elif not cls._supports_attention_backend:
        reason = "its transformers class takes no attention function"
    elif getattr(text_config, "router_jitter_noise", None):
        reason = f"its router draws random numbers (router_jitter_noise={text_config.router_jitter_noise})"
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


def build_empty(config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model without memory for its weights, on the meta device."""
    with torch.device("meta"):
        policy: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return policy


@torch.no_grad()
def check_policy(model: str, policy: PreTrainedModel) -> None:
    """Run two short sequences, packed and alone, and refuse a model for which that makes a difference.

    Left out in half precision, whose rounding hides what is looked for.

    Args:
        model: its name, for the error.
        policy: loaded with packed attention.

    Raises:
        ConfigError: says what differs.
    """
    config = policy.config
    head: Any = policy.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise _refusal(model, config, "its output layer has a bias" if head is not None else "it has no output layer")
    if policy.dtype not in (torch.float32, torch.float64):
        return
    vocabulary = config.get_text_config().vocab_size
    tokens = torch.arange(1, 13, device=policy.device) % vocabulary
    first, second = tokens[:5], tokens[5:]
    try:
        hidden = _run(policy.base_model, first, second).last_hidden_state[0]
        alone = _run(policy.base_model, second).last_hidden_state[0]
        logits = _run(policy, first, second).logits[0]
    except NotImplementedError as error:
        raise _refusal(model, config, str(error)) from error
    except BUILD_ERRORS as error:
        raise _refusal(model, config, f"it fails on them with {describe_error(error)}") from error
    if not bool(logits.isfinite().all()):
        raise not_finite(model, find_not_finite(named_weights(policy)))
    if not _agree(hidden[5:], alone):
        raise _refusal(model, config, "a sequence's result depends on the one packed before it")
    softcap = getattr(config.get_text_config(), "final_logit_softcapping", None)
    if not _agree(scale_logits(hidden @ head.weight.T, 1.0, softcap), logits):
        raise _refusal(model, config, "its logits are not its output layer times its last hidden states")


def not_finite(model: str, names: Sequence[str]) -> ConfigError:
    """The error for a model whose results are not finite.

    Args:
        model: its name.
        names: of its weights that are not finite.
    """
    found = "computes NaN or infinite logits from finite weights"
    if names:
        found = f"has NaN or infinite values in {len(names)} of its weights, such as '{names[0]}'"
    return ConfigError(f"model='{model}' {found}. Use another copy or an earlier checkpoint of it.")


def find_not_finite(weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names of those weights that hold a NaN or an infinite value, in this rank's shards."""
    shards = ((name, local_tensor(weight)) for name, weight in weights)
    # A sum takes no memory, and is not finite if one of its terms is not.
    return [name for name, shard in shards if not (bool(shard.sum().isfinite()) or bool(shard.isfinite().all()))]


def check_architecture(model: str, config: PreTrainedConfig) -> None:
    """As :func:`check_policy`, on two small layers of the same architecture with random weights, on the CPU.

    For a model that is never whole in one place.

    Args:
        model: its name, for the error.
        config: the model's; it is left as it is.

    Raises:
        ConfigError: says what differs.
    """
    small = copy.deepcopy(config)
    text_config = small.get_text_config()
    heads = text_config.num_attention_heads
    per_head = head_size(config)  # a head keeps its size: positions are scaled by lists of that length
    sizes: dict[str, Any] = {
        "vocab_size": 128,
        "pad_token_id": 0,
        "num_hidden_layers": 2,
        "layer_types": (sorted(set(getattr(text_config, "layer_types", None) or ())) * 2)[:2],
        "num_attention_heads": 2,
        "num_key_value_heads": 2 if num_key_value_heads(config) == heads else 1,
        "hidden_size": 2 * per_head,
        "intermediate_size": 4 * per_head,
        "moe_intermediate_size": per_head,
    }
    for name, value in sizes.items():
        if is_set_for_all_layers(text_config, name):
            setattr(text_config, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy = AutoModelForCausalLM.from_config(small, dtype=torch.float32, attn_implementation=PACKED_ATTENTION)
    check_policy(model, policy)


def describe_traits(config: PreTrainedConfig) -> list[str]:
    """Return what an architecture has that not all have, for errors: where actor and engine disagree, it may be there.

    Args:
        config: the model's.
    """
    text_config = config.get_text_config()
    scaled = sorted({rope["rope_type"] for rope in scaled_ropes(config)})
    layers = sorted(set(getattr(text_config, "layer_types", None) or ()) - {"full_attention"})
    policy = build_empty(config)
    saved = {name.rpartition(".")[2] for name, _ in named_weights(policy)} - {
        name.rpartition(".")[2] for name, _ in policy.named_parameters()
    }
    conversions = get_model_conversion_mapping(policy, add_legacy=False)
    traits = {
        config.model_type: True,
        "its output layer is the embedding": text_config.tie_word_embeddings,
        f"rotary positions are scaled ({', '.join(scaled)})": scaled,
        f"layers of {', '.join(layers)}": layers,
        f"buffers are weights ({', '.join(sorted(saved))})": saved,
        "its weights are stored under other names or in other shapes than they run in": conversions,
        f"{num_experts(config)} experts": num_experts(config),
        "latent attention": getattr(text_config, "kv_lora_rank", None),
        "logits are capped": getattr(text_config, "final_logit_softcapping", None),
    }
    return [trait for trait, is_there in traits.items() if is_there]


def _run(model: torch.nn.Module, *sequences: torch.Tensor) -> Any:
    lengths = [len(sequence) for sequence in sequences]
    bounds = torch.tensor([0, *lengths], device=sequences[0].device).cumsum(0).int()
    return model(
        input_ids=torch.cat(sequences)[None],
        position_ids=torch.cat([torch.arange(length, device=bounds.device) for length in lengths])[None],
        use_cache=False,
        cu_seq_lens_q=bounds,
        cu_seq_lens_k=bounds,
        max_length_q=max(lengths),
        max_length_k=max(lengths),
    )


def _agree(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two results differ by rounding only."""
    return bool((got - expected).norm() <= 1e-3 * expected.norm())


def _refusal(model: str, config: PreTrainedConfig, reason: str) -> ConfigError:
    return ConfigError(
        f"model='{model}' ({config.model_type}) cannot be trained on packed sequences: {reason}. {_WAY_OUT}"
    )
