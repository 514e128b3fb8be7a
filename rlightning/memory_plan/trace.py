"""Bytes of activations: the model's own code run on tensors without memory, and what it would hold counted.

A formula would have to follow what each architecture keeps. Here two and three layers of the model run forward and
backward on fake tensors of a micro-batch's size, and every storage is counted from its making to its end. What the
third layer adds is what each further one would.

What Qwen3 keeps of one layer for its backward, bytes a token, without checkpointing (``E`` hidden size, ``H`` query
heads, ``K`` key/value heads, ``D`` head size, ``I`` intermediate size; queries [T, H, D], keys and values [T, K, D],
the attention kernel's result [T, H, D], log-sum-exps [H, T]):

================================  ==========================================  ==================================
                                  weights and activations in bfloat16 (FSDP)  autocast over float32 weights
================================  ==========================================  ==================================
two norms and their results       2 (4E + 2E + 2E)                            2 (4E + 2E)
what the linear layers cast       none                                        3 * 2E and 2 * 2E
queries', keys' norms             6HD + 6KD                                   6HD + 6KD
attention                         4HD + 4KD + 4H                              4HD + 4KD + 4H
feed-forward                      4 * 2I                                      4 * 2I
================================  ==========================================  ==================================

The norms' reciprocals, [T] and [T, heads] float32, are left out of this table and counted by the trace. With torch
2.11 keys and values are repeated for the kernel: 8HD in place of 4HD + 4KD. A compiled layer keeps less, see
memory_plan/compiled.py. With
checkpointing a layer keeps its input, E of the residual stream's type, and one layer at a time the rest.
"""

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig

from rlightning.errors import ConfigError
from rlightning.foreign_text import cut_line
from rlightning.memory_plan.compiled import bytes_kept_by_compiled
from rlightning.memory_plan.dispatch import ExpertProducts, LiveBytes
from rlightning.models.attention import kernel_obstacle, padded_attention, varlen_attention
from rlightning.models.layers import checkpoint_layers, decoder_layers
from rlightning.models.policy import narrow_residuals
from rlightning.models.sizes import head_size, inner_size, num_key_value_heads

CUDA_ATTENTION = "rlightning_packed_as_on_cuda"


def attention_as_on_cuda(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """:func:`~rlightning.models.attention.packed_attention` as a GPU would run it, on tensors that are on none."""
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    is_packed = kernel_obstacle(q.dtype, q.shape[-1], v.shape[-1]) is None
    attend = varlen_attention if is_packed else padded_attention
    bounds, longest = kwargs["cu_seq_lens_q"], kwargs["max_length_q"]
    return attend(q, k, v, bounds, longest, kwargs.get("scaling"), kwargs.get("sliding_window")).unsqueeze(0), None


AttentionInterface.register(CUDA_ATTENTION, attention_as_on_cuda)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationBytes:
    """What forward and backward of the decoder hold beside weights and gradients; numbers may be fractions.

    Attributes:
        kept: between forward and backward, the last hidden states included.
        forward: at the peak of the forward pass.
        backward: at the peak of the backward pass.
        scoring: at the peak of a forward pass without gradient.
    """

    kept: float
    forward: float
    backward: float
    scoring: float

    def __add__(self, other: "ActivationBytes") -> "ActivationBytes":
        return _combine(self, other, 1.0)

    def __sub__(self, other: "ActivationBytes") -> "ActivationBytes":
        return _combine(self, other, -1.0)

    def __mul__(self, factor: float) -> "ActivationBytes":
        return ActivationBytes(**{field.name: factor * getattr(self, field.name) for field in fields(self)})


def _combine(a: ActivationBytes, b: ActivationBytes, sign: float) -> ActivationBytes:
    names = [field.name for field in fields(ActivationBytes)]
    return ActivationBytes(**{name: getattr(a, name) + sign * getattr(b, name) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """How the decoder computes.

    Attributes:
        dtype: of the weights that the layers see.
        is_autocast: whether linear layers cast to bfloat16.
        gradient_checkpointing: whether a layer's activations are computed again.
        is_compiled: whether layers are compiled.
        tensor_parallel_size: ranks that split each layer.
    """

    dtype: torch.dtype
    is_autocast: bool
    gradient_checkpointing: bool
    is_compiled: bool = False
    tensor_parallel_size: int = 1


def measure_activations(config: PreTrainedConfig, decoder: Decoder, tokens: int, longest: int) -> ActivationBytes:
    """Bytes that a micro-batch's activations take in the whole decoder.

    Args:
        config: the model's.
        decoder: how it computes.
        tokens: of the micro-batch.
        longest: tokens of its sequences.

    Returns:
        Those of two layers of each kind, and what a third one adds to them as often as there are further layers. Of
        compiled layers only what they keep is told apart; what is on top of that for a moment is taken for eager.

    Raises:
        ConfigError: if the model's code cannot run without values, as some routing to experts cannot.
    """
    kinds = group_layers(config)
    rest: list[ActivationBytes] = []
    layers = ActivationBytes(kept=0, forward=0, backward=0, scoring=0)
    for kind, count in kinds.items():
        two, three = (_trace(config, decoder, [kind] * number, tokens, longest) for number in (2, 3))
        layer = three - two
        rest.append(two - layer * 2)
        if decoder.is_compiled:
            kept = layer.kept
            if decoder.gradient_checkpointing:
                whole = replace(decoder, gradient_checkpointing=False)
                fewer, more = (_trace(config, whole, [kind] * number, tokens, longest).kept for number in (2, 3))
                kept = more - fewer
            saved = max(kept - _trace_compiled(config, decoder, kind, tokens, longest), 0)
            if decoder.gradient_checkpointing:  # the backward has the activations of a layer at a time
                rest[-1] = rest[-1] - ActivationBytes(kept=0, forward=0, backward=saved, scoring=0)
            else:
                layer = layer - ActivationBytes(kept=saved, forward=saved, backward=saved, scoring=0)
        layers = layers + layer * count
    return layers + ActivationBytes(
        **{field.name: max(getattr(part, field.name) for part in rest) for field in fields(ActivationBytes)}
    )


def _trace(config: PreTrainedConfig, decoder: Decoder, layers: list[int], tokens: int, longest: int) -> ActivationBytes:
    with _fake_model(config, decoder, layers) as model:
        if decoder.gradient_checkpointing:
            checkpoint_layers(model, len(layers))
        return _run(model, decoder, tokens, min(longest, tokens))


def _trace_compiled(config: PreTrainedConfig, decoder: Decoder, kind: int, tokens: int, longest: int) -> int:
    """Bytes that a layer of a kind keeps once it is compiled."""
    given: dict[str, Any] = {}

    def take(layer: nn.Module, args: Any, kwargs: Any) -> None:
        given.update(kwargs, hidden_states=args[0])

    with _fake_model(config, decoder, [kind]) as model, _autocast(decoder):
        (layer,) = decoder_layers(model)
        hook = layer.register_forward_pre_hook(take, with_kwargs=True)
        model.base_model(**_inputs(tokens, min(longest, tokens)))
        hook.remove()
        return bytes_kept_by_compiled(layer, given.pop("hidden_states"), given)


@contextmanager
def _fake_model(config: PreTrainedConfig, decoder: Decoder, layers: list[int]) -> Iterator[Any]:
    """The model with the given layers, and inside, all tensors without memory."""
    config = shrink(config, layers, decoder.tensor_parallel_size)
    try:
        # While a strategy has a model made, tensors are by default on its device, which autocast here does not know.
        with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"), torch.random.fork_rng(devices=[]):
            model: Any = AutoModelForCausalLM.from_config(
                config, dtype=decoder.dtype, attn_implementation=CUDA_ATTENTION
            )
            narrow_residuals(model)
            with ExpertProducts():
                yield model.eval()  # no dropout, as in training
    except (RuntimeError, AssertionError, TypeError, ValueError, LookupError, AttributeError) as error:
        # Where code asks for a value, or for an operator that is not for a CPU, and where fewer layers do not fit
        # together; torch's partitioner has asserts, too.
        lines = str(error).strip().splitlines() or [""]
        raise ConfigError(
            f"The memory of a {config.model_type} cannot be planned: its code does not run without values "
            f"({type(error).__name__}: {cut_line(lines[0], 160)}). Measure it on a GPU; memory/peak_gib is among the "
            "metrics."
        ) from error


def _inputs(tokens: int, longest: int) -> dict[str, Any]:
    """Those of a micro-batch of sequences of equal length."""
    ids = torch.zeros(1, tokens, dtype=torch.long)
    bounds = torch.zeros(-(-tokens // longest) + 1, dtype=torch.int32)
    tensors = {"input_ids": ids, "position_ids": ids, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    return {**tensors, "max_length_q": longest, "max_length_k": longest, "use_cache": False}


def _autocast(decoder: Decoder) -> Any:
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if decoder.is_autocast else nullcontext()


def _run(model: Any, decoder: Decoder, tokens: int, longest: int) -> ActivationBytes:
    for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
        parameter.register_post_accumulate_grad_hook(_drop_gradient)  # gradients are counted elsewhere
    inputs = _inputs(tokens, longest)
    given = [value for value in inputs.values() if isinstance(value, Tensor)]
    live = LiveBytes([*model.parameters(), *model.buffers(), *given])
    with live:
        with _autocast(decoder), torch.no_grad():
            hidden = model.base_model(**inputs).last_hidden_state
        scoring = live.peak
        del hidden
        live.restart()
        with _autocast(decoder):
            hidden = model.base_model(**inputs).last_hidden_state
        kept, forward = live.now, live.peak
        live.restart()
        hidden.backward(torch.empty_like(hidden))
        return ActivationBytes(kept=kept, forward=forward, backward=live.peak, scoring=scoring)


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def group_layers(config: PreTrainedConfig) -> Counter[int]:
    """Return the number of layers of each kind, by the first layer of that kind."""
    text_config: Any = config.get_text_config()
    lists = list(layer_lists(text_config).values())
    firsts: dict[tuple[Any, ...], int] = {}
    return Counter(
        firsts.setdefault(tuple(values[layer] for values in lists), layer)
        for layer in range(text_config.num_hidden_layers)
    )


def layer_lists(text_config: Any) -> dict[str, list[Any]]:
    """Return what a configuration lists layer by layer, such as ``layer_types``, ``mlp_layer_types``."""
    return {
        name: value
        for name, value in vars(text_config).items()
        if "layer" in name and isinstance(value, list) and len(value) == text_config.num_hidden_layers
    }


def shrink(config: PreTrainedConfig, layers: list[int], tensor_parallel_size: int) -> PreTrainedConfig:
    """The same architecture with the given layers only, a rank's part of each, and next to no vocabulary."""
    small = copy.deepcopy(config)
    text_config: Any = small.get_text_config()
    heads, size = text_config.num_attention_heads, tensor_parallel_size
    if vars(text_config).get("head_dim", 0) is None:
        text_config.head_dim = head_size(config)
    if size > 1:
        text_config.head_dim = head_size(config)
        text_config.num_key_value_heads = num_key_value_heads(config) // size
        text_config.num_attention_heads = heads // size
        text_config.intermediate_size = inner_size(config) // size
    for name, values in layer_lists(text_config).items():
        setattr(text_config, name, [values[layer] for layer in layers])
    text_config.num_hidden_layers = len(layers)
    text_config.vocab_size, text_config.pad_token_id = 8, None
    if getattr(text_config, "rope_parameters", None):
        text_config.rope_parameters = _unscaled(text_config.rope_parameters)
    return small


def _unscaled(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions, of all layers or by their kind, without scaling: that takes no memory, but asks for values."""
    if any(isinstance(value, dict) for value in rope.values()):
        return {kind: _unscaled(value) for kind, value in rope.items()}
    return {**rope, "rope_type": "default"}
