"""A small net with odd sizes, sharded by torch's own functions, and processes to run it in."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rank_processes import finish, start_calls
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

T = TypeVar("T")


def run_ranks(work: Callable[..., T], num_ranks: int, folder: Path, *args: Any, device_type: str = "cpu") -> list[T]:
    """Return the JSON results of ``work(folder, *args)`` in each process of one group; raise an error if one fails."""
    (folder / "store").unlink(missing_ok=True)
    return finish(start_calls(_join, num_ranks, folder, work, args, device_type))


def _join(folder: Path, work: Callable[..., T], args: tuple[Any, ...], device_type: str) -> T:
    rank, num_ranks, _ = (int(os.environ.pop(name)) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    try:
        return work(folder, *args)
    finally:
        dist.destroy_process_group()


class OddNet(nn.Module):
    """An embedding, a block of two linears of which tensor parallelism splits tokens and inner size; a norm, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.up = nn.Linear(7, 13)
        self.down = nn.Linear(13, 7, bias=False)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 3)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[T] to [T, 3]."""
        hidden = self.embedding(token_ids)
        logits: Tensor = self.head(self.norm(hidden + self.down(self.up(hidden).relu())))
        return logits


def make_net(seed: int = 0) -> OddNet:
    """The same on every rank."""
    torch.manual_seed(seed)
    return OddNet()


def shard_net(
    net: OddNet, replicate: int, shard: int, tensor_parallel: int, *, device_type: str = "cpu", offload: bool = False
) -> OddNet:
    """Split ``net`` over a mesh of the three dimensions, of which those of size 0 are left out."""
    sizes = {"replicate": replicate, "shard": shard, "tensor_parallel": tensor_parallel}
    names = tuple(name for name, size in sizes.items() if size)
    mesh = init_device_mesh(device_type, tuple(sizes[name] for name in names), mesh_dim_names=names)
    if tensor_parallel:
        rows = RowwiseParallel(input_layouts=Replicate())  # of the embedding: tokens
        plan = {"embedding": rows, "up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(net, mesh["tensor_parallel"], plan)
    data_parallel = tuple(name for name in names if name != "tensor_parallel")
    policy = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
    for part in (net.embedding, net.up, net):
        fully_shard(part, mesh=mesh[data_parallel], offload_policy=policy)
    return net
