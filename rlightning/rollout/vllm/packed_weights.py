"""Tensors that vLLM derives from loaded weights, which have to be recomputed after each weight sync.

vLLM's ``load_weights`` sets the parameters only. Two kinds of layers compute with tensors derived from them. CPU
kernels for experts replace the parameters by packed ones, into which later weights would be written at wrong positions.
Latent attention decodes with two halves of ``kv_b_proj``, which would keep the values of the first weights. Neither
fault raises an error, and the second does not change a prompt's log-probabilities.
"""

from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rlightning.protocols import has

_pack_again: WeakKeyDictionary[nn.Module, Callable[[], None]] = WeakKeyDictionary()
_unpacked: WeakKeyDictionary[nn.Module, dict[str, tuple[nn.Parameter, Tensor]]] = WeakKeyDictionary()
"""Unpacked parameters of each layer of experts, by name, with their data, which packing may replace."""


class LatentAttention(Protocol):
    """A vLLM layer of latent attention, with tensors derived from ``kv_b_proj`` that each sync has to recompute."""

    kv_b_proj: nn.Module

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Compute the two halves of ``kv_b_proj``, and store them in the layer."""


def keep_experts_unpacked() -> None:
    """Have vLLM's experts on a CPU keep their unpacked weights. Called before a model is created."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    # Before vLLM 0.28 the method packs by itself.
    method: Any = unquantized_fused_moe_method.UnquantizedFusedMoEMethod
    packer: Any = cpu_moe.CPUUnquantizedExperts if hasattr(cpu_moe, "CPUUnquantizedExperts") else method
    pack: Any = packer.process_weights_after_loading

    def keep_and_pack(experts: object, layer: nn.Module) -> None:
        _unpacked[layer] = {name: (weight, weight.data) for name, weight in layer.named_parameters(recurse=False)}
        _pack_again[layer] = lambda: pack(experts, layer)
        pack(experts, layer)

    packer.process_weights_after_loading = keep_and_pack


def unpack_weights(model: nn.Module) -> None:
    """Restore a model's unpacked expert weights, into which new ones can be loaded. Called at the start of a sync."""
    for layer in model.modules():
        for name, (weight, data) in _unpacked.get(layer, {}).items():
            weight.data = data
            layer.register_parameter(name, weight)


def pack_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Recompute the tensors that a model derives from its weights. Called after the last weight of a sync."""
    for layer in model.modules():
        if layer in _pack_again:
            _pack_again[layer]()
        elif has(layer, LatentAttention):
            _split_again(layer, dtype)


def _split_again(layer: LatentAttention, dtype: torch.dtype) -> None:
    """Split ``kv_b_proj`` again, into the same memory, because CUDA graphs refer to its address."""
    before = {name: value for name, value in vars(layer).items() if isinstance(value, Tensor)}
    layer.process_weights_after_loading(dtype)
    for name, old in before.items():
        new = getattr(layer, name)  # an attribute or a parameter
        if new is not old:
            setattr(layer, name, old.copy_(new))
