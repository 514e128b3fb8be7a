"""Measures the bytes of activations by running the model's code on fake tensors, which have no memory.

A formula would have to be adapted to each architecture. Instead, two and then three layers of the model run forward and
backward on fake tensors of a micro-batch's size, and the bytes of all live storages are counted. The difference is what
each further layer needs.

For its backward a layer of Qwen3 keeps, in bytes a token without checkpointing (``E`` hidden size, ``H`` query heads,
``K`` key/value heads, ``D`` head size, ``I`` intermediate size):

    16E (two norms and their results, in bfloat16; 22E under autocast, with what the linear layers cast)
    + 6HD + 6KD (queries' and keys' norms) + 4HD + 4KD + 4H (attention, its log-sum-exps) + 8I (feed-forward)

and the norms' reciprocals. With torch 2.11 keys and values are repeated for the attention kernel: 8HD in place of 4HD +
4KD. With checkpointing each layer keeps only its input, E of the residual stream's dtype; one layer at a time keeps all
of the above. A compiled layer keeps less, since the backward recomputes cheap operations such as norms, activation
functions and casts; which ones is taken from the compiler's partitioner, applied to the layer's graph.
"""

import copy
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rlightning.errors import ConfigError
from rlightning.foreign_text import cut_line
from rlightning.models.adapter import LoRA
from rlightning.models.adapter_layers import adapter_parameters, add_adapter
from rlightning.models.attention import packed_attention, packed_inputs
from rlightning.models.counts import cache_by_config, head_size, inner_size, num_key_value_heads, read_setting
from rlightning.models.layers import checkpoint_layers, decoder_layers
from rlightning.models.policy import narrow_residuals
from rlightning.models.routers import keep_routers_float32
from rlightning.models.whole_policy import hold_as_computed
from rlightning.python_values import JsonObject

CUDA_ATTENTION = "rlightning_packed_as_on_cuda"


class ActivationBytes(NamedTuple):
    """Bytes of activations in the decoder's forward and backward, without weights and gradients; may be fractions.

    Attributes:
        kept: bytes kept between forward and backward, including the last hidden states.
        forward: bytes at the peak of the forward pass.
        backward: bytes at the peak of the backward pass.
        scoring: bytes at the peak of a forward pass without gradient.
    """

    kept: float
    forward: float
    backward: float
    scoring: float


Bytes = NDArray[np.float64]
"""[4], in the order of :class:`ActivationBytes`."""
KEPT, UPDATE, BACKWARD = (np.array(row, float) for row in ([1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 1, 0]))
"""The numbers in :data:`Bytes` that a term adds to: kept alone; kept, forward and backward; backward alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """How the decoder computes: its dtype, autocast, checkpointing, compilation and adapter.

    With an adapter (rank above 0) the weights are frozen, and layers whose names end with a target are adapted.
    """

    dtype: torch.dtype
    is_autocast: bool
    gradient_checkpointing: bool
    is_compiled: bool = False
    tensor_parallel_size: int = 1
    adapter_rank: int = 0
    adapter_targets: tuple[str, ...] = ()

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context manager in which forward passes run."""
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if self.is_autocast else nullcontext()


@cache_by_config
def fit_activations(config: PreTrainedConfig, decoder: Decoder, longest: int) -> tuple[Bytes, Bytes]:
    """Return the bytes of activations as a linear function of a micro-batch's tokens: offset and slope per token, each
    [4] in the order of :class:`ActivationBytes`.

    The micro-batch has sequences of ``longest`` tokens; raises the errors of :func:`measure_activations`.
    """
    some, more = (np.array(measure_activations(config, decoder, longest * n, longest)) for n in (2, 4))
    slope = (more - some) / (2 * longest)
    return some - slope * (2 * longest), slope


def measure_activations(config: PreTrainedConfig, decoder: Decoder, tokens: int, longest: int) -> ActivationBytes:
    """Return the bytes of activations of the whole decoder, for sequences of ``longest`` tokens.

    Two layers of each kind are measured, and for each further layer the difference that a third one makes. For compiled
    layers only the kept bytes are measured separately; temporary bytes are assumed to be the same as without compiling.

    Raises:
        ConfigError: the model's code needs the values of tensors, as the routing of some mixtures of experts does.
    """

    def trace_layer(kind: int, decoder: Decoder) -> tuple[Bytes, Bytes]:
        """Return the bytes that each layer of a kind adds, and the bytes outside of layers: [4] each. ``kind`` is the
        index of the kind's first layer.
        """
        two, three = (
            _trace(reduce([kind] * number), replace(decoder, is_compiled=False), tokens, longest) for number in (2, 3)
        )
        return three - two, 3 * two - 2 * three

    def reduce(layers: list[int]) -> PreTrainedConfig:
        return shrink(config, layers, decoder.tensor_parallel_size)

    layers, rest = np.zeros(4), np.full(4, -np.inf)
    for kind, count in group_layers(config).items():
        layer, beside = trace_layer(kind, decoder)
        if decoder.is_compiled:
            is_checkpointed = decoder.gradient_checkpointing
            eager = trace_layer(kind, replace(decoder, gradient_checkpointing=False))[0] if is_checkpointed else layer
            compiled = trace_compiled(reduce([kind]), replace(decoder, gradient_checkpointing=False), tokens, longest)
            saved = max(eager @ KEPT - compiled, 0)
            if is_checkpointed:  # the backward has the activations of one layer at a time
                beside -= saved * BACKWARD
            else:
                layer -= saved * UPDATE
        layers += count * layer
        rest = np.maximum(rest, beside)
    return ActivationBytes(*(layers + rest).tolist())


@cache_by_config
def _trace(config: PreTrainedConfig, decoder: Decoder, tokens: int, longest: int) -> Bytes:
    """Return the bytes of activations of all layers of a :func:`shrink`-ed configuration, uncompiled; cached."""
    with _fake_model(config, decoder, tokens, longest) as (model, inputs, live):
        if decoder.gradient_checkpointing:
            checkpoint_layers(model, config.get_text_config().num_hidden_layers)
        for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
            parameter.register_post_accumulate_grad_hook(_drop_gradient)  # gradients are counted elsewhere
        with decoder.autocast(), torch.no_grad():
            hidden = model.base_model(**inputs).last_hidden_state
        scoring = live.peak
        del hidden
        live.restart()
        with decoder.autocast():
            hidden = model.base_model(**inputs).last_hidden_state
        kept, forward = live.now, live.peak
        live.restart()
        hidden.backward(torch.empty_like(hidden))
        return np.array([kept, forward, live.peak, scoring], float)


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


@cache_by_config
def trace_compiled(config: PreTrainedConfig, decoder: Decoder, tokens: int, longest: int) -> int:
    """Return the bytes that a compiled layer keeps for backward. ``config`` has only this layer (:func:`shrink`)."""
    given: dict[str, Any] = {}
    num_bytes = 0

    def take(layer: nn.Module, args: tuple[Tensor], kwargs: dict[str, object]) -> None:
        given.update(kwargs, hidden_states=args[0])

    def count(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        nonlocal num_bytes
        results: Any = gm.graph.output_node().args[0]
        inputs = _storages(node for node in gm.graph.nodes if node.op == "placeholder")
        num_bytes = sum(size for storage, size in _storages(results).items() if storage not in inputs)
        return boxed_nop(gm, example_inputs)

    with _fake_model(config, decoder, tokens, longest) as (model, inputs, _), decoder.autocast():
        (layer,) = decoder_layers(model)
        hook = layer.register_forward_pre_hook(take, with_kwargs=True)
        model.base_model(**inputs)
        hook.remove()
        compiled = aot_function(
            lambda weights, hidden, others: functional_call(layer, weights, (hidden,), others),
            fw_compiler=count,
            bw_compiler=boxed_nop,  # type: ignore[arg-type]  # typed for fewer inputs than it accepts
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )
        hidden = given.pop("hidden_states").detach().requires_grad_()
        compiled({**dict(layer.named_parameters()), **dict(layer.named_buffers())}, hidden, given)
    return num_bytes


def _storages(nodes: Iterable[object]) -> dict[int, int]:
    """Return the bytes of the tensors in a graph's nodes, by the identity of their storage."""
    values = (node.meta.get("val") for node in nodes if isinstance(node, torch.fx.Node))
    storages = (value.untyped_storage() for value in values if isinstance(value, Tensor))
    return {storage._cdata: storage.nbytes() for storage in storages}


@contextmanager
def _fake_model(
    config: PreTrainedConfig, decoder: Decoder, tokens: int, longest: int
) -> Iterator[tuple[PreTrainedModel, dict[str, Any], "LiveBytes"]]:
    """Yield the model, its inputs and a byte counter, in a mode in which tensors have no memory."""
    length = min(longest, tokens)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=decoder.dtype, attn_implementation=CUDA_ATTENTION
            )
            narrow_residuals(model)
            keep_routers_float32(model)
            if decoder.adapter_rank:
                adapt(model, decoder)
        # While a strategy builds a model, the default device is the strategy's, for which autocast is not enabled here.
        with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"), torch.random.fork_rng(devices=[]):
            model.to_empty(device="cpu")
            ids = torch.zeros(tokens, dtype=torch.long)
            bounds = torch.zeros(-(-tokens // length) + 1, dtype=torch.int32)  # sequences of equal length
            inputs = packed_inputs(ids, ids, bounds, length)
            with LiveBytes([*model.parameters(), *model.buffers(), ids, bounds]) as live:
                yield model.eval(), inputs, live  # no dropout, as in training
    except (RuntimeError, AssertionError, TypeError, ValueError, LookupError, AttributeError) as error:
        # Code that needs a value, an operator that the CPU lacks, or fewer layers that do not fit together; torch's
        # partitioner has assertions, too.
        lines = str(error).strip().splitlines() or [""]
        raise ConfigError(
            f"The memory of a {config.model_type} cannot be planned: its code does not run without values "
            f"({type(error).__name__}: {cut_line(lines[0], 160)}). Measure it on a GPU; memory/peak_gib is among the "
            "metrics."
        ) from error


def adapt(model: PreTrainedModel, decoder: Decoder) -> None:
    """Freeze a model, and add an adapter to the layers that match the decoder's targets."""
    if decoder.is_autocast:
        hold_as_computed(model, torch.bfloat16)
    rank, targets = decoder.adapter_rank, decoder.adapter_targets
    modules = dict.fromkeys(targets, (0, 0))  # their sizes are the model's
    add_adapter(
        model, LoRA(rank=rank, alpha=rank, use_rslora=False, modules=modules, targets=targets), torch.device("meta")
    )
    for _, factor in adapter_parameters(model):
        factor.data = factor.data.to(decoder.dtype)  # FSDP gathers the factors in the dtype of the base


AttentionInterface.register(CUDA_ATTENTION, partial(packed_attention, as_on_cuda=True))


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations allocate, until each storage is freed.

    The storages of ``ignored`` tensors are not counted. ``now`` are the allocated bytes, ``peak`` their maximum since
    :meth:`restart`.
    """

    def __init__(self, ignored: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {tensor.untyped_storage()._cdata for tensor in ignored}
        self.now = self.peak = 0

    def restart(self) -> None:
        """Reset the peak to the bytes that are allocated now."""
        self.peak = self.now

    # Typed as in torch.
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_product = func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16
        result = grouped_product(*args, **kwargs or {}) if is_product else func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


def grouped_product(left: Tensor, right: Tensor, offs: Tensor, **kwargs: object) -> Tensor:
    """Return an empty tensor of the shape of torch's grouped matrix product of experts, which fake tensors support only
    in bfloat16.
    """
    if right.ndim == 3:  # tokens times each expert's weights
        return left.new_empty(left.shape[0], right.shape[2])
    return left.new_empty(offs.shape[0], left.shape[0], right.shape[1])  # the gradient of the weights


def group_layers(config: PreTrainedConfig) -> Counter[int]:
    """Return the number of layers of each kind, by the index of the kind's first layer."""
    text_config = config.get_text_config()
    lists = list(layer_lists(text_config).values())
    firsts: dict[tuple[object, ...], int] = {}
    return Counter(
        firsts.setdefault(tuple(values[layer] for values in lists), layer)
        for layer in range(text_config.num_hidden_layers)
    )


def layer_lists(text_config: PreTrainedConfig) -> dict[str, list[object]]:
    """Return the settings of a configuration that have one value for each layer, such as ``layer_types``."""
    return {
        name: value
        for name, value in vars(text_config).items()
        if "layer" in name and isinstance(value, list) and len(value) == text_config.num_hidden_layers
    }


def shrink(config: PreTrainedConfig, layers: list[int], tensor_parallel_size: int) -> PreTrainedConfig:
    """Return a copy of a configuration with only the given layers, a tensor-parallel rank's part of each, and a tiny
    vocabulary.
    """
    small = copy.deepcopy(config)
    text_config: Any = small.get_text_config()  # each architecture has its own attributes
    heads, size = text_config.num_attention_heads, tensor_parallel_size
    if size > 1 or vars(text_config).get("head_dim", 0) is None:
        text_config.head_dim = head_size(config)
    if size > 1:
        text_config.num_key_value_heads = num_key_value_heads(config) // size
        text_config.num_attention_heads = heads // size
        text_config.intermediate_size = inner_size(config) // size
    for name, values in layer_lists(text_config).items():
        setattr(text_config, name, [values[layer] for layer in layers])
    text_config.num_hidden_layers = len(layers)
    text_config.vocab_size, text_config.pad_token_id = 8, None
    if read_setting(small, "rope_parameters"):
        text_config.rope_parameters = _unscaled(text_config.rope_parameters)
    return small


def _unscaled(rope: JsonObject) -> JsonObject:
    """Return rotary settings without scaling, which needs no memory, but cannot run on fake tensors."""
    if any(isinstance(value, dict) for value in rope.values()):
        return {kind: _unscaled(value) for kind, value in rope.items()}
    return {**rope, "rope_type": "default"}
