"""Collectives on values other than the model's tensors: counts, decisions, completions.

These functions use the CPU (gloo) group and no device; in a single process they do nothing. All ranks must call the
same functions in the same order: each begins with a barrier, whose error contains ``name`` if a rank is missing.
"""

import pickle
from collections.abc import Mapping
from typing import Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlightning.parallel.barrier import barrier
from rlightning.parallel.cpu_group import cpu_group
from rlightning.parallel.execution_mode import HasWorldSize
from rlightning.protocols import has

T = TypeVar("T")
OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def global_rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def all_reduce(tensor: Tensor, op: Literal["sum", "max"] = "sum", *, name: str = "reduce") -> Tensor:
    """Return the sum or maximum of a small tensor over all ranks, on the tensor's device; every rank must call this."""
    group = cpu_group()
    if group is None:
        return tensor
    barrier(name)
    reduced = tensor.detach().to("cpu", copy=True).contiguous()
    dist.all_reduce(reduced, OPS[op], group=group)
    return reduced.to(tensor.device)


def any_rank(flag: bool, *, name: str) -> bool:
    """Return whether ``flag`` is True on at least one rank; every rank must call this, and gets the same result."""
    return bool(all_reduce(torch.tensor(int(flag)), "max", name=name))


def gather_objects(thing: T, *, name: str) -> list[T]:
    """Return the objects of all ranks, in the order of ranks; every rank must call this, with a picklable object."""
    group = cpu_group()
    if group is None:
        return [thing]
    barrier(name)
    gathered: list[T] = [thing] * dist.get_world_size()
    dist.all_gather_object(gathered, thing, group=group)
    return gathered


def all_to_all_objects(objects_by_rank: Mapping[int, T], *, name: str) -> dict[int, T]:
    """Send each rank its object; return the objects for this rank by sending rank. Every rank must call this.

    Objects are picklable; a rank without an entry in ``objects_by_rank`` gets none from this rank.
    """
    group, own = cpu_group(), global_rank()
    received = {own: objects_by_rank[own]} if own in objects_by_rank else {}
    if group is None:
        return received
    barrier(name)
    outgoing = {
        rank: torch.frombuffer(bytearray(pickle.dumps(thing, pickle.HIGHEST_PROTOCOL)), dtype=torch.uint8)
        for rank, thing in objects_by_rank.items()
        if rank != own
    }
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    for rank, data in outgoing.items():
        sizes[rank] = data.numel()
    table = [torch.empty_like(sizes) for _ in range(dist.get_world_size())]
    dist.all_gather(table, sizes, group=group)
    incoming = {rank: torch.empty(int(row[own]), dtype=torch.uint8) for rank, row in enumerate(table) if row[own]}
    work = [dist.irecv(data, src=rank, group=group) for rank, data in incoming.items()]
    work += [dist.isend(data, dst=rank, group=group) for rank, data in outgoing.items()]
    for one in work:
        assert one is not None
        one.wait()
    received |= {rank: pickle.loads(data.numpy().data) for rank, data in incoming.items()}
    return dict(sorted(received.items()))


class HasRank(Protocol):
    """A training loop with this process's rank as ``global_rank``, such as Lightning's Trainer; None if unknown."""

    global_rank: int | None


def rank_in(loop: object) -> int:
    """Return the rank of this process: ``loop.global_rank``, else that of torch.distributed, else 0."""
    if has(loop, HasRank) and loop.global_rank is not None:
        return loop.global_rank
    return global_rank()


def num_ranks_in(loop: object) -> int:
    """Return the number of ranks: ``loop.world_size``, else that of torch.distributed, else 1."""
    if has(loop, HasWorldSize) and loop.world_size is not None:
        return loop.world_size
    return world_size()
