"""Weights for engines on the same host: memory that both sides open, and that one fills and the other reads.

On the CPU it is a memory file, on one CUDA device an allocation that is opened by its IPC handle.
"""

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlightning.parallel.barrier import barrier
from rlightning.parallel.collectives import all_to_all_objects
from rlightning.parallel.device import shareable_memory
from rlightning.rollout.weights.driver import WeightReceiver, WeightSender
from rlightning.rollout.weights.source import ChunkPlan, WeightSource


class SharedMemorySender(WeightSender):
    """Fills a bucket that engines on this host read.

    Args:
        plan: of the weights.
        device: where the engines are: the CPU, or the CUDA device that the actor is on too.
        ranks: neighbours, this rank among them, whose buckets one engine reads, a worker each; or none. All ranks of
            the run then make their sender, and fill it, at the same time.
        destination: this rank, if it alone has a bucket and the others give their shards by
            :class:`~rlightning.rollout.weights.transports.ShardSender`.
    """

    def __init__(
        self, plan: ChunkPlan, device: torch.device, *, ranks: Sequence[int] = (), destination: int | None = None
    ) -> None:
        self.plan, self.destination = plan, destination
        self._num_ranks = len(ranks)
        self._fd: int | None = None
        if device.type == "cuda":
            from torch.multiprocessing.reductions import reduce_tensor

            with shareable_memory():
                self.bucket = torch.empty(plan.num_bytes, dtype=torch.uint8, device=device)
            location: CUDAMemory | MemoryFile = CUDAMemory(*reduce_tensor(self.bucket))
        else:
            self._fd = os.memfd_create("rlightning-weights")
            os.ftruncate(self._fd, plan.num_bytes)
            self.bucket = torch.frombuffer(mmap.mmap(self._fd, plan.num_bytes), dtype=torch.uint8)
            location = MemoryFile(os.getpid(), self._fd)
        receiver = SharedMemoryReceiver(plan, location)
        self._receivers = [receiver]
        if self._num_ranks > 1:
            self._receivers = list(all_to_all_objects({ranks[0]: receiver}, name="weight buckets").values())

    def make_receivers(self, devices: Sequence[str]) -> "list[SharedMemoryReceiver]":
        """See :meth:`WeightSender.make_receivers`: each worker of an engine reads the bucket of its own rank."""
        return [self._receivers[worker % len(self._receivers)] for worker in range(len(devices))]

    def fill(self, source: WeightSource) -> Iterator[int]:
        """See :meth:`WeightSender.fill`."""
        for chunk in super().fill(source):
            self._meet("weights in the bucket")
            yield chunk
            self._meet("weights in the engine")

    def _meet(self, name: str) -> None:
        if self._num_ranks > 1:
            barrier(name)

    def close(self) -> None:
        """See :meth:`WeightSender.close`."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        super().close()


class MemoryFile(NamedTuple):
    """A bucket in a memory file of the process ``pid``, by its descriptor there."""

    pid: int
    fd: int

    def open(self, device: torch.device, num_bytes: int) -> Tensor:
        """Return the bucket."""
        with open(f"/proc/{self.pid}/fd/{self.fd}", "r+b") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)


class CUDAMemory(NamedTuple):
    """A bucket on a CUDA device: torch's function that opens it, and the arguments, of ``reduce_tensor``."""

    rebuild: Callable[..., Tensor]
    arguments: Sequence[object]

    def open(self, device: torch.device, num_bytes: int) -> Tensor:
        """Return the bucket; the device is the sender's, under whatever index it has here."""
        arguments = list(self.arguments)
        arguments[6] = device.index  # rebuild_cuda_tensor's storage_device, which is the sender's index
        return self.rebuild(*arguments)


class SharedMemoryReceiver(WeightReceiver):
    """Reads a sender's bucket. The memory is released with the last tensor that lies in it.

    Args:
        plan: of the weights.
        location: of the bucket.
    """

    def __init__(self, plan: ChunkPlan, location: MemoryFile | CUDAMemory) -> None:
        self.plan, self._location = plan, location

    def open(self, device: torch.device) -> None:
        """Open the bucket."""
        self._bucket = self._location.open(device, self.plan.num_bytes)

    def receive(self, chunk: int) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`WeightReceiver.receive`: the chunk is there when the worker is asked for it."""
        return self.plan.tensors(self._bucket, chunk)
