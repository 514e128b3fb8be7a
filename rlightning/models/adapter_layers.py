"""A policy with an adapter: PEFT's layers replace linear layers, and the base weights are frozen.

A layer computes ``W x + s B A x``, with ``W`` of the base, ``A`` [r, in], ``B`` [out, r] and the scaling ``s``.
:func:`~rlightning.parallel.sharding.named_weights` yields the base's weights under their original names.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MethodType

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlightning.errors import ConfigError
from rlightning.models.adapter import LoRA, import_peft
from rlightning.models.adapter_files import base_digest, read_weights, stored_name
from rlightning.models.finite import find_not_finite
from rlightning.parallel.collectives import gather_objects
from rlightning.parallel.device import exact_float32
from rlightning.parallel.gathering import gather_into, local_part
from rlightning.parallel.sharding import CodedLinear, base_name, local_tensor, named_weights
from rlightning.torch_internals import with_local_tensor

NAME = "default"
"""Name of the adapter within PEFT's layers."""
LAYERS_ATTRIBUTE = "adapted_layers"
"""Attribute of a policy with its adapted layers by their names in the base model."""
DIGEST_ATTRIBUTE = "loaded_base_digest"
"""Attribute of a policy with the digest of its base weights' files at the time when they were loaded."""
PERTURBATION = 0.2
"""The norm of a perturbed adapter's additions, relative to the matrices to which they are added."""


class AdaptedLinear(nn.Module):
    """The type of a linear layer that PEFT has wrapped (``lora.Linear``): the attributes that this package uses."""

    base_layer: nn.Linear | CodedLinear
    lora_A: Mapping[str, nn.Linear]  # noqa: N815  # PEFT's names
    lora_B: Mapping[str, nn.Linear]  # noqa: N815
    scaling: dict[str, float]
    cast_input_dtype_enabled: bool
    disable_adapters: bool
    _disable_adapters: bool


def add_adapter(policy: PreTrainedModel, lora: LoRA, device: torch.device) -> None:
    """Wrap the adapted linear layers in PEFT's layers, and freeze all other parameters.

    The adapter's weights are on ``device`` ("meta" for a policy that is sharded before memory is allocated), and are
    not initialised (:func:`initialize_adapter`).
    """
    peft = import_peft()
    policy.requires_grad_(False)
    config = peft.LoraConfig(**lora.peft_settings() | {"target_modules": list(lora.modules)})
    peft.inject_adapter_in_model(config, policy, NAME, low_cpu_mem_usage=True)
    layers = {name: module for name, module in policy.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer)}
    vars(policy)[LAYERS_ATTRIBUTE] = layers  # a search takes 10 ms, and each pass without the adapter needs them
    for layer in adapted_layers(policy).values():
        layer.cast_input_dtype_enabled = False  # autocast, or FSDP, casts the factors to the inputs' dtype
        for factor in (layer.lora_A, layer.lora_B):
            shape, dtype = factor[NAME].weight.shape, torch.get_default_dtype()
            factor[NAME].weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))


def adapted_layers(policy: nn.Module) -> dict[str, AdaptedLinear]:
    """Return the layers that :func:`add_adapter` has wrapped, by their names in the base model; else none."""
    layers: dict[str, AdaptedLinear] = vars(policy).get(LAYERS_ATTRIBUTE, {})
    return layers


@torch.no_grad()
def initialize_adapter(policy: PreTrainedModel, lora: LoRA) -> None:
    """Set the adapter's initial values: those of its folder, or random numbers for ``A`` and zeros for ``B``. Every
    rank must call it.

    The values do not depend on the number of ranks.
    """
    stored = None if lora.start is None else read_weights(lora.start)
    if broken := find_not_finite((stored or {}).items()):
        raise ConfigError(f"adapter.path='{lora.start}' has a weight that is NaN or infinite, '{broken[0]}'.")
    random = torch.Generator().manual_seed(gather_objects(torch.initial_seed() % 2**63, name="adapter")[0])
    for name, weight in adapter_parameters(policy):
        # Lightning configures a model with the GPU as the default device.
        whole = torch.zeros(weight.shape, dtype=torch.float32, device="cpu") if stored is None else stored[name]
        if stored is None and ".lora_A." in name:
            bound = weight.shape[1] ** -0.5  # PEFT's, the usual one of a linear layer
            whole.uniform_(-bound, bound, generator=random)
        local_tensor(weight.detach()).copy_(local_part(whole, weight))


def store_digest(policy: PreTrainedModel, model: str) -> None:
    """Set the digest of a policy's base, read from the files from which its weights have just been loaded."""
    vars(policy)[DIGEST_ATTRIBUTE] = base_digest(model)


def loaded_digest(policy: PreTrainedModel, model: str) -> str:
    """Return the digest of a policy's base as it was when it was loaded (:func:`store_digest`), even if the files
    have been replaced or removed since; without one, that of the files of ``model`` now.
    """
    digest: str | None = vars(policy).get(DIGEST_ATTRIBUTE)
    return base_digest(model) if digest is None else digest


def adapter_parameters(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapter's weights, whole or sharded, by their names in PEFT's files."""
    for name, layer in adapted_layers(policy).items():
        yield stored_name(name, "A"), layer.lora_A[NAME].weight
        yield stored_name(name, "B"), layer.lora_B[NAME].weight


@contextmanager
def adapter_off(policy: nn.Module) -> Iterator[None]:
    """Context manager in which the policy computes with its base weights alone, without gradients."""
    layers = adapted_layers(policy).values()
    assert layers, "add_adapter was called with another object"
    # Not PEFT's enable_adapters(), which marks the adapter's weights as frozen, and FSDP may read that mark meanwhile.
    for layer in layers:
        layer._disable_adapters = True
    assert all(layer.disable_adapters for layer in layers), "PEFT has another name for it"
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def merged_forward(policy: nn.Module) -> Iterator[None]:
    """Context manager in which each adapted layer multiplies by its base matrix with the adapter merged into it, as an
    engine does that is sent merged weights.

    The merged matrix is rounded to the base's dtype. Training instead adds the products of base and adapter.
    """

    def forward(layer: AdaptedLinear, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        if layer.disable_adapters:
            result: Tensor = layer.base_layer(x)
            return result
        weight, bias = layer.base_layer.weight, layer.base_layer.bias
        merged = add_product(weight, layer.lora_A[NAME].weight, layer.lora_B[NAME].weight, layer.scaling[NAME])
        return F.linear(x, merged.to(weight.dtype), bias)

    layers = adapted_layers(policy).values()
    assert layers, "add_adapter was called with another object"
    for layer in layers:
        layer.forward = MethodType(forward, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def merged_weights(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights, with the adapter merged, under the base model's names, one at a time; every rank must iterate.

    Sharded weights stay sharded; ``A`` is gathered.
    """
    layers = adapted_layers(policy)
    for name, weight in named_weights(policy):
        layer = layers.get(name.removesuffix(".weight"))
        yield name, weight if layer is None else merge(layer)


def computed_weights(policy: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """Return, by base weight name, a function for each weight that must be computed before it is written to a file or
    sent to an engine.

    These are matrices into which the adapter is merged, and dequantised matrices. The functions are collectives: every
    rank must call them.
    """
    computed: dict[str, Callable[[], Tensor]] = {
        base_name(f"{name}.weight"): partial(getattr, module, "weight")
        for name, module in policy.named_modules()
        if isinstance(module, CodedLinear)
    }
    return computed | {f"{name}.weight": partial(merge, layer) for name, layer in adapted_layers(policy).items()}


@torch.no_grad()
def merge(layer: AdaptedLinear) -> nn.Parameter:
    """Return a layer's matrix with its adapter merged, in float32, sharded like the base's; every rank must call it."""
    base, a, b = layer.base_layer.weight, layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
    local = local_tensor(base.detach())
    whole = torch.empty(a.shape, dtype=torch.float32, device=local.device)
    gather_into([whole], [a.detach()])  # base and B are both sharded by rows
    merged = add_product(local, whole, local_tensor(b.detach()), layer.scaling[NAME])
    return nn.Parameter(with_local_tensor(base.detach(), merged), requires_grad=False)


def add_product(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Return ``weight + scaling * b @ a`` in float32, even under autocast or with TF32 enabled."""
    with torch.autocast(weight.device.type, enabled=False), exact_float32():
        return torch.add(weight.float(), b.float() @ a.float(), alpha=scaling)


@contextmanager
@torch.no_grad()
def perturbed_adapter(policy: nn.Module) -> Iterator[None]:
    """Context manager that adds noise to each layer's factor ``B``, which clearly changes the layer's output, and then
    restores ``B``. The noise is the same on all ranks, and every rank must enter it.
    """
    assert adapted_layers(policy), "add_adapter was called with another object"
    random = torch.Generator().manual_seed(0)
    saved: list[tuple[Tensor, Tensor]] = []
    try:
        for layer, size in zip(adapted_layers(policy).values(), perturbation_sizes(policy), strict=True):
            b = layer.lora_B[NAME].weight
            values = local_tensor(b.detach())
            saved.append((values, values.clone()))
            noise = torch.randn(b.shape, generator=random, device="cpu") * size
            values += local_part(noise, b).to(values.device)
        yield
    finally:
        for values, before in saved:
            values.copy_(before)


def perturbation_sizes(policy: nn.Module) -> list[float]:
    """Return the scale of the noise for each layer's ``B`` with which the product ``s B A`` changes by about
    :data:`PERTURBATION` times the norm of the base matrix.

    A collective over the shards of all ranks: every rank must call it.
    """
    layers = adapted_layers(policy).values()
    sums: list[Tensor] = []
    counts: list[float] = []
    for layer in layers:
        for weight in (layer.base_layer.weight, layer.lora_A[NAME].weight):  # one at a time: access computes some
            shard = local_tensor(weight.detach())
            sums.append(shard.float().square().sum())
            counts.append(float(shard.numel()))
    parts = gather_objects((torch.stack(sums).double().tolist(), counts), name="sizes of weights")
    total, number = (torch.tensor([part[i] for part in parts], dtype=torch.float64).sum(0) for i in range(2))
    means = (total / number).sqrt().clamp(min=1e-12).view(-1, 2).tolist()  # root mean squares of the base and of A
    return [
        PERTURBATION * base / (layer.scaling[NAME] * a * layer.lora_A[NAME].weight.shape[0] ** 0.5)
        for layer, (base, a) in zip(layers, means, strict=True)
    ]
