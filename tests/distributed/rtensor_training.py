"""A Ray worker that trains a small net, data- and tensor-parallel with three others, and stores what it computes."""

import ctypes
import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from rtensor_worker import StoringWorker
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rlightning.callbacks import RemotizeOnHeadOnly
from rlightning.distributed.rtensor import remotize
from rlightning.hooks import fire

NUM_TOKENS = 43_690
RESULT_BYTES = NUM_TOKENS * 3 * 4
"""Of one step and rank: logits [T, 3] float32, half a megabyte."""


class Net(nn.Module):
    """An embedding, a block that tensor parallelism splits, a head."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.block = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8, bias=False))
        self.head = nn.Linear(8, 3)
        parallelize_module(self.block, mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(self, mesh=mesh["data_parallel"])

    def forward(self, token_ids: Tensor) -> Tensor:
        """[T] to [T, 3]."""
        hidden = self.embedding(token_ids)
        logits: Tensor = self.head(hidden + self.block(hidden))
        return logits


class TrainingWorker(StoringWorker):
    """One rank of a 2 x 2 mesh; it remembers its replies until they are acknowledged, if it is told to."""

    def join(self, folder: Path, rank: int) -> None:
        """Meet the others and build the net."""
        dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=4)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
        self.net = Net(mesh)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.data_rank = mesh.get_local_rank("data_parallel")
        self.loop = SimpleNamespace(callbacks=[RemotizeOnHeadOnly()], device_mesh=mesh)
        self.replies: dict[int, Any] = {}
        self.remembers = False

    def begin(self, with_callback: bool, remembers: bool) -> None:
        """Start a run with the callback or without."""
        fire(self.loop, self.net, "teardown", "fit")
        if with_callback:
            fire(self.loop, self.net, "setup", "fit")
        self.replies.clear()
        self.remembers = remembers

    def step(self, number: int) -> Any:
        """Train on this data-parallel rank's tokens; handles to the logits."""
        generator = torch.Generator().manual_seed(2 * number + self.data_rank)
        logits = self.net(torch.randint(11, (NUM_TOKENS,), generator=generator))
        loss = logits.square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        reply = remotize({"logits": logits, "loss": loss.item()}, label="step")
        if self.remembers:
            self.replies[number] = reply
        return reply

    def acknowledge(self, number: int) -> None:
        """The controller has what it needs of this reply."""
        self.replies.pop(number, None)

    def resident_bytes(self) -> int:
        """Memory of this process, what it has mapped of Ray's store included."""
        return resident_bytes()


def resident_bytes() -> int:
    """Memory of the process that asks, without what its allocator keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
