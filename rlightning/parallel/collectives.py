"""What the ranks of a run tell each other that is no tensor of the model: counts, decisions, completions.

Everything here goes over the CPU (gloo) group and touches no device. Without several processes it is a no-op, so
callers need not ask. All ranks must call the same function in the same order; they meet at a barrier first, whose error
says by ``name`` where a rank did not come.
"""

import pickle
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rlightning.parallel.barrier import barrier
from rlightning.parallel.cpu_group import cpu_group

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def world_size() -> int:
    """How many ranks the run has."""
    return 1 if cpu_group() is None else dist.get_world_size()


def global_rank() -> int:
    """This process's place among them."""
    return 0 if cpu_group() is None else dist.get_rank()


def all_reduce(tensor: Tensor, op: Literal["sum", "max"] = "sum", *, name: str = "reduce") -> Tensor:
    """Reduce over all ranks.

    Args:
        tensor: small, of any device; it is left as it is.
        op: sum or max.
        name: of the barrier.

    Returns:
        The result, on the tensor's device; the tensor itself where there is one rank.
    """
    group = cpu_group()
    if group is None:
        return tensor
    barrier(name)
    reduced = tensor.detach().to("cpu", copy=True).contiguous()
    dist.all_reduce(reduced, _OPS[op], group=group)
    return reduced.to(tensor.device)


def any_rank(flag: bool, *, name: str) -> bool:
    """Whether ``flag`` is set on any rank; every rank gets the same answer."""
    return bool(all_reduce(torch.tensor(int(flag)), "max", name=name))


def gather_objects(thing: Any, *, name: str) -> list[Any]:
    """Every rank's ``thing``, in the order of ranks."""
    group = cpu_group()
    if group is None:
        return [thing]
    barrier(name)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, thing, group=group)
    return gathered


def exchange(parcels: Mapping[int, Any], *, name: str) -> dict[int, Any]:
    """Send objects from rank to rank.

    Args:
        parcels: by destination rank; they are pickled, and those for this rank handed over as they are.
        name: of the barrier.

    Returns:
        What was sent to this rank, by the rank that it came from, in the order of ranks.
    """
    group = cpu_group()
    own = dist.get_rank() if group is not None else 0
    received = {own: parcels[own]} if own in parcels else {}
    if group is None:
        return received
    barrier(name)
    outgoing = {
        rank: torch.frombuffer(bytearray(pickle.dumps(parcel, pickle.HIGHEST_PROTOCOL)), dtype=torch.uint8)
        for rank, parcel in parcels.items()
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
