"""Weights for engines on the same host, in shared memory that the trainer writes and the engine reads.

On a CPU this is a memory file; on a CUDA device, an allocation that is opened by its IPC handle.
"""

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlightning.parallel.collectives import all_to_all_objects
from rlightning.parallel.device import shareable_memory
from rlightning.rollout.weights.driver import WeightReceiver, WeightSender
from rlightning.rollout.weights.source import ChunkPlan


class SharedMemorySender(WeightSender):
    """Writes weights into a bucket in memory, which the workers of engines on this host open and read.

    Args:
        plan: plan of the weights.
        device: device of the engines: the CPU, or the actor's CUDA device.
        ranks: consecutive ranks whose buckets the workers of one engine read, one for each worker. If not empty, all
            ranks of the run must create their senders at the same time.
        destination: this rank, if only this rank has a bucket, and the others send their shards by a
            plain :class:`WeightSender`.
    """

    def __init__(
        self, plan: ChunkPlan, device: torch.device, *, ranks: Sequence[int] = (), destination: int | None = None
    ) -> None:
        self._fd: int | None = None
        if device.type == "cuda":
            from torch.multiprocessing.reductions import reduce_tensor

            with shareable_memory():
                bucket = torch.empty(plan.num_bytes, dtype=torch.uint8, device=device)
            location: CUDAMemory | MemoryFile = CUDAMemory(*reduce_tensor(bucket))
        else:
            self._fd = os.memfd_create("rlightning-weights")
            os.ftruncate(self._fd, plan.num_bytes)
            bucket = torch.frombuffer(mmap.mmap(self._fd, plan.num_bytes), dtype=torch.uint8)
            location = MemoryFile(os.getpid(), self._fd)
        super().__init__(plan, bucket, destination=destination)
        receiver = SharedMemoryReceiver(plan, location)
        self._receivers = [receiver]
        if len(ranks) > 1:
            self._receivers = list(all_to_all_objects({ranks[0]: receiver}, name="weight buckets").values())

    def make_receivers(self, devices: Sequence[str]) -> "list[SharedMemoryReceiver]":
        """Return a receiver for each worker, which reads the bucket of its own rank."""
        return [self._receivers[worker % len(self._receivers)] for worker in range(len(devices))]

    def close(self) -> None:
        """Free the bucket."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        super().close()


class MemoryFile(NamedTuple):
    """A bucket in a memory file that process ``pid`` has open as file descriptor ``fd``."""

    pid: int
    fd: int

    def open(self, device: torch.device, num_bytes: int) -> Tensor:
        """Map the bucket into this process, and return it as a tensor of ``num_bytes`` bytes."""
        with open(f"/proc/{self.pid}/fd/{self.fd}", "r+b") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)


class CUDAMemory(NamedTuple):
    """A bucket on a CUDA device: the function and arguments from ``reduce_tensor`` that open it."""

    rebuild: Callable[..., Tensor]
    arguments: Sequence[object]

    def open(self, device: torch.device, num_bytes: int) -> Tensor:
        """Map the bucket into this process, and return it as a tensor on ``device``, which is the sender's device."""
        arguments = list(self.arguments)
        arguments[6] = device.index  # rebuild_cuda_tensor's storage_device, which is the sender's index
        return self.rebuild(*arguments)


class SharedMemoryReceiver(WeightReceiver):
    """Reads a sender's bucket; the memory is released with the last tensor that uses it.

    Args:
        plan: plan of the weights.
        location: the bucket's location.
    """

    def __init__(self, plan: ChunkPlan, location: MemoryFile | CUDAMemory) -> None:
        self.plan, self._location = plan, location

    def open(self, device: torch.device) -> None:
        """Map the sender's bucket into this process, from host memory or from a CUDA device."""
        self._bucket = self._location.open(device, self.plan.num_bytes)

    def receive(self, chunk: int) -> Iterator[tuple[str, Tensor]]:
        """Yield a chunk's names and tensors, which are already in the bucket."""
        return self.plan.tensors(self._bucket, chunk)
