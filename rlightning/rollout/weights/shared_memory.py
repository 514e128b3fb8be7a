"""Weights for engines on the same host, in shared memory that the trainer writes and the engine reads.

On a CPU this is a memory file; on a CUDA device, an allocation that is opened by its IPC handle.
"""

import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from rlightning.parallel.collectives import all_to_all_objects
from rlightning.parallel.device import shareable_memory
from rlightning.rollout.weights.driver import WeightReceiver, WeightSender
from rlightning.rollout.weights.source import ChunkPlan, ChunkViews


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
            open_bucket = partial(open_cuda_memory, *reduce_tensor(bucket))
        else:
            self._fd = os.memfd_create("rlightning-weights")
            os.ftruncate(self._fd, plan.num_bytes)
            bucket = torch.frombuffer(mmap.mmap(self._fd, plan.num_bytes), dtype=torch.uint8)
            open_bucket = partial(open_memory_file, os.getpid(), self._fd, plan.num_bytes)
        super().__init__(plan, bucket, destination=destination)
        receiver = SharedMemoryReceiver(plan, open_bucket)
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


class SharedMemoryReceiver(WeightReceiver):
    """Reads a sender's bucket; the memory is released with the last tensor that uses it.

    Args:
        plan: plan of the weights.
        open_bucket: maps the bucket into this process, and returns it; its argument is the worker's device.
    """

    def __init__(self, plan: ChunkPlan, open_bucket: Callable[[torch.device], Tensor]) -> None:
        self.plan, self._open_bucket = plan, open_bucket

    def open(self, device: torch.device) -> None:
        """Map the sender's bucket into this process, from host memory or from a CUDA device."""
        self._views = ChunkViews(self.plan, self._open_bucket(device))

    def receive(self, chunk: int) -> Iterable[tuple[str, Tensor]]:
        """Return a chunk's names and tensors, which are already in the bucket."""
        return self._views.tensors(chunk)


def open_memory_file(pid: int, fd: int, num_bytes: int, device: torch.device) -> Tensor:
    """Map the memory file that process ``pid`` has open as file descriptor ``fd``; return its ``num_bytes`` bytes."""
    with open(f"/proc/{pid}/fd/{fd}", "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)


def open_cuda_memory(rebuild: Callable[..., Tensor], arguments: Sequence[object], device: torch.device) -> Tensor:
    """Map an allocation on ``device``, the sender's device, by the function and arguments from ``reduce_tensor``."""
    own = list(arguments)
    own[6] = device.index  # rebuild_cuda_tensor's storage_device, which is the sender's index
    return rebuild(*own)
