"""How weights are sharded over ranks, and access to a rank's shard."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rlightning.torch_internals import non_persistent_buffers

CPUOffload = Literal["none", "optimizer", "parameters"]
Automatic = bool | Literal["auto"]
"""A setting that the memory plan chooses if it is "auto"."""


@dataclass(frozen=True)
class Sharding:
    """The settings that determine how a model is sharded over the ranks.

    Args:
        mesh: device mesh of all ranks, with the dimensions ``replicate``, ``shard`` and ``tensor_parallel``.
        device: this rank's device.
        compute_dtype: dtype of weights and activations in forward and backward; None for that of the stored weights.
        cpu_offload: what is kept in host memory; see :class:`~rlightning.parallel.FSDP`.
        reshard_after_forward: whether a layer's gathered weights are freed between its forward and its backward.
    """

    mesh: DeviceMesh
    device: torch.device
    compute_dtype: torch.dtype | None = None
    cpu_offload: CPUOffload = "none"
    reshard_after_forward: bool = True

    @property
    def storage_device(self) -> torch.device:
        """The device on which shards are stored while they are not used."""
        return torch.device("cpu") if self.cpu_offload == "parameters" else self.device

    def shard(
        self, module: nn.Module, precision: MixedPrecisionPolicy | None = None, *, reshard_after_forward: bool = True
    ) -> None:
        """Shard a module's parameters in place over the data-parallel ranks, as one group that is gathered together."""
        is_on_host = self.cpu_offload == "parameters"
        fully_shard(
            module,
            # FSDP shards over the last dimension, and keeps copies over one before it (hybrid sharding).
            mesh=self.mesh["shard"] if self.mesh["replicate"].size() == 1 else self.mesh["replicate", "shard"],
            reshard_after_forward=reshard_after_forward,
            mp_policy=precision or MixedPrecisionPolicy(),
            offload_policy=CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if is_on_host else OffloadPolicy(),
        )


def reshard(module: nn.Module) -> None:
    """Free the weights that FSDP has gathered for a forward pass, which ``parameters()`` returns until then."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def release_without_gradient(policy: nn.Module) -> None:
    """Free FSDP's gathered weights if gradients are disabled; called after a forward pass that no backward pass
    follows.

    Otherwise they would be used again after an optimizer step has changed the shards.
    """
    if not torch.is_grad_enabled():
        reshard(policy)


def shard_parts(owner: nn.Module, sharding: Sharding) -> None:
    """Shard, in place, the modules of ``owner`` that are not sharded yet, such as a subclass's value head.

    Values must be equal on all ranks. Each module is gathered for its ``forward`` and again for the backward, in its
    own dtype. For a container without a forward, such as a ModuleList, the children are sharded instead; other
    parameters are not sharded.
    """
    parts = list(_parts(owner))
    holders = Counter(parameter for module in owner.modules() for parameter in module.parameters(recurse=False))
    for part in parts:
        within = Counter(parameter for module in part.modules() for parameter in module.parameters(recurse=False))
        if all(holders[parameter] == count for parameter, count in within.items()):  # none is tied to another part
            sharding.shard(part)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the largest modules below ``module`` that FSDP can shard as one group each."""
    for child in module.children():
        if isinstance(child, FSDPModule):
            continue
        parameters = list(child.parameters())
        has_forward = type(child).forward is not nn.Module.forward
        if parameters and has_forward and _is_group(parameters):
            yield child
        else:
            yield from _parts(child)


def _is_group(parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether FSDP2 can gather these parameters together."""
    if any(isinstance(p, DTensor) or not p.ndim or not p.is_floating_point() for p in parameters):
        return False
    return len({parameter.dtype for parameter in parameters}) == 1


def is_adapter_weight(name: str) -> bool:
    """Return whether a parameter belongs to an adapter, by its name in PEFT's layers."""
    return ".lora_A." in name or ".lora_B." in name


def base_name(name: str) -> str:
    """Convert a parameter's name in a model with PEFT's adapter to its name in the base model."""
    return name.replace(".base_layer.", ".")


class CodedLinear(nn.Module):
    """Base of linear layers that store their weight matrix as quantised codes and dequantise it when it is used.

    Attributes:
        codes: the quantised matrix, as a parameter that the subclass encodes and decodes.
    """

    codes: nn.Parameter
    scales: nn.Parameter
    bias: nn.Parameter | None

    @property
    def weight(self) -> nn.Parameter:
        """The dequantised matrix, computed at each access; files and engines contain it instead of the codes."""
        raise NotImplementedError


def named_weights(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights by their names in a model's files: parameters, tied ones once, then persistent buffers.

    For a policy with an adapter, yield the base model's weights, under the base model's names.
    """
    coded = {name: module for name, module in policy.named_modules() if isinstance(module, CodedLinear)}
    for name, parameter in policy.named_parameters():
        layer, _, own = name.rpartition(".")
        if layer in coded and own == "codes":
            yield base_name(f"{layer}.weight"), coded[layer].weight
        elif not is_adapter_weight(name) and not (layer in coded and own == "scales"):
            yield base_name(name), parameter
    for prefix, module in policy.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in non_persistent_buffers(module):
                yield (f"{prefix}.{name}" if prefix else name), buffer


def local_tensor(tensor: Tensor) -> Tensor:
    """Return a DTensor's shard on this rank; a plain tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def rounded_vectors(policy: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Context manager in which vectors (norm gains, biases) are rounded to ``dtype``, as engines store them.

    Their values are restored afterwards. Matrices are not changed, since autocast rounds them.
    """
    vectors = [local_tensor(parameter.data) for parameter in policy.parameters() if parameter.ndim < 2]
    masters = [vector.clone() for vector in vectors]
    try:
        for vector in vectors:
            vector.copy_(vector.to(dtype))
        yield
    finally:
        for vector, master in zip(vectors, masters, strict=True):
            vector.copy_(master)
