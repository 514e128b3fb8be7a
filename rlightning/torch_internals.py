"""Private names of torch that have no public equivalent; tests/test_library_internals.py checks each."""

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.nn.attention.varlen import _varlen_attn_backward
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
else:  # type checkers do not find it in that module
    Store = dist.Store

# What is imported here under another name.
__all__ = ["Store", "StridedShard", "TorchDispatchMode", "is_traceable_wrapper_subclass"]


all_gather_single = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
"""torch's all-gather into one tensor; the name of torch before 2.13 is deprecated."""


def sum_over_ranks(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of a tensor over the ranks of a group, as a new tensor.

    In compiled code torch 2.11 loses the gradient of what a collective has changed in place, without an error.
    """
    if torch.compiler.is_compiling():
        reduced: Tensor = functional.wait_tensor(functional.all_reduce(part.contiguous(), "sum", group))
        return reduced
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def stack_over_ranks(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors [...] of all ranks of a group as one [ranks, ...]; see :func:`sum_over_ranks`."""
    if torch.compiler.is_compiling():
        gathered: Tensor = functional.wait_tensor(functional.all_gather_tensor(part.contiguous()[None], 0, group))
        return gathered
    parts = part.new_empty(group.size(), *part.shape)
    all_gather_single(parts, part.contiguous().unsqueeze(0), group=group)
    return parts


def default_store() -> Store:
    """Return the store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def nccl_backends() -> "list[dist.ProcessGroupNCCL]":
    """Return the NCCL backends of all process groups."""
    found: list[dist.ProcessGroupNCCL] = []
    if not dist.is_available() or not dist.is_initialized() or not dist.is_nccl_available():
        return found
    for group in list(dist.distributed_c10d._world.pg_names):
        with contextlib.suppress(RuntimeError):  # a group without a backend for this device
            backend = group._get_backend(torch.device("cuda"))
            if isinstance(backend, dist.ProcessGroupNCCL):
                found.append(backend)
    return found


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of a group's collectives."""
    _set_pg_timeout(timeout, group)


def inner_tensors(tensor: object) -> dict[str, Tensor]:
    """Return the tensors of which a wrapper tensor consists, by name; empty for a plain tensor."""
    if not is_traceable_wrapper_subclass(tensor):
        return {}
    names, _ = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def with_local_tensor(tensor: Tensor, local: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return a DTensor like ``tensor`` with another local shard, which may be on a device other than the mesh's.

    ``shape`` is its full shape, by default that of ``tensor``. For a plain tensor ``local`` is returned.
    """
    if not isinstance(tensor, DTensor):
        return local
    _, layout = tensor.__tensor_flatten__()
    parts = inner_tensors(tensor) | {"_local_tensor": local}
    whole = tensor if shape is None else torch.empty(tuple(shape), device="meta")
    rebuilt: Tensor = DTensor.__tensor_unflatten__(parts, layout, whole.shape, whole.stride())
    return rebuilt


class AdamW(torch.optim.AdamW):  # of the same name, which LearningRateMonitor logs
    """torch's AdamW, which steps on each rank's shards of DTensors as on plain tensors. Its state is of DTensors.

    The result is the same, since the step is elementwise. On DTensors, fused AdamW of torch 2.11 keeps half a kilobyte
    of host memory for each parameter and step for ever (https://github.com/pytorch/pytorch/issues/188174).
    """

    def _init_group(
        self, group: dict[str, Any], params_with_grad: list[Tensor], grads: list[Tensor], *rest: Any
    ) -> Any:
        """Append the group's tensors to the lists, which the step changes in place."""
        is_complex = super()._init_group(group, params_with_grad, grads, *rest)  # type: ignore[no-untyped-call]
        for place, (parameter, grad) in enumerate(zip(params_with_grad, grads, strict=True)):
            if isinstance(parameter, DTensor) and isinstance(grad, DTensor) and grad.placements != parameter.placements:
                grads[place] = grad.redistribute(placements=parameter.placements)
        for tensors in (params_with_grad, grads, *rest):
            tensors[:] = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        return is_complex


def copy_tensors(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source tensor into its target, in one call."""
    if targets:
        torch._foreach_copy_(targets, sources)


def zero_tensors(tensors: list[Tensor]) -> None:
    """Fill each tensor with zeros, in one call."""
    if tensors:
        torch._foreach_zero_(tensors)


def scale_tensors(tensors: list[Tensor], factor: Tensor | list[float]) -> None:
    """Multiply tensors in place, in one call: all by a scalar on their device, or each by its own number."""
    if tensors:
        torch._foreach_mul_(tensors, factor)


def is_write(operator: "torch._ops.OpOverload[..., object]") -> bool:
    """Return whether an operator, as a TorchDispatchMode gets it, writes into its arguments."""
    return operator._schema.is_mutable


def norms(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the Euclidean norm of each tensor, computed in ``dtype``, many in one kernel."""
    return list(torch._foreach_norm(tensors, 2, dtype=dtype))


def set_allocator(settings: str) -> None:
    """Replace all settings of the CUDA caching allocator; they apply to later allocations."""
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    change(settings)


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that its ``state_dict`` leaves out."""
    return module._non_persistent_buffers_set


def varlen_attn_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    window_size: tuple[int, int],
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values of ``varlen_attn``, for a given result and log-sum-exps."""
    random_state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout, which it has none of
    inputs, bounds = (grad, query, key, value, out, lse), (cu_seq_q, cu_seq_k, max_q, max_k)
    grads: tuple[Tensor, Tensor, Tensor] = _varlen_attn_backward(
        *inputs, *bounds, window_size == (-1, 0), random_state, scale, list(window_size)
    )
    return grads
