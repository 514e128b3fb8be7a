"""Parameters that a sharding strategy does not shard: each rank has a whole copy.

FSDP averages only the gradients of parameters that it shards. This module keeps the other parameters equal on all
ranks: rank 0's values are broadcast at the start, and gradients are averaged before each optimizer step.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def move_replicated(module: nn.Module, device: torch.device) -> None:
    """Move the unsharded parameters and buffers of ``module`` to ``device``, in place."""
    for tensor in _replicated_tensors(module):
        tensor.data = tensor.data.to(device)


@torch.no_grad()
def broadcast_replicated(module: nn.Module) -> None:
    """Replace the unsharded parameters and buffers of ``module`` by rank 0's values; every rank must call this.

    Random initial values may differ between ranks.
    """
    for tensor in _replicated_tensors(module):
        dist.broadcast(tensor.detach(), 0)


@torch.no_grad()
def average_gradients(module: nn.Module) -> None:
    """Average the gradients of trained, unsharded parameters over the ranks, in place; every rank must call this.

    A gradient that is missing on some ranks counts as 0 there; one that is missing on all ranks stays None.
    """
    whole = [p for p in module.parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if not whole:
        return
    flags = torch.tensor([float(p.grad is not None) for p in whole], device=whole[0].device)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in whole]
    summed = torch.cat([flags, *(gradient.flatten() for gradient in gradients)])  # cat() promotes to the widest dtype
    dist.all_reduce(summed)
    counts, *parts = summed.split([len(whole), *(p.numel() for p in whole)])
    for parameter, gradient, count, part in zip(whole, gradients, counts.tolist(), parts, strict=True):
        if count:
            parameter.grad = gradient.copy_((part / dist.get_world_size()).view_as(gradient))


def _replicated_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of the module and its submodules, except those that FSDP shards."""
    if isinstance(module, FSDPModule):
        return
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if not isinstance(tensor, DTensor):
            yield tensor
    for child in module.children():
        yield from _replicated_tensors(child)
