"""The actor's weights on their way to an engine: one flat bucket, filled and emptied as often as the model needs.

The trainer fills a :class:`WeightBucket` chunk by chunk in the engine's dtype; the engine's worker opens the same
memory and loads from it. The bucket is made once and reused. On the CPU it is an anonymous memory file
(``memfd_create``), which leaves nothing behind however its processes end; on CUDA it travels by an IPC handle.

Sharded weights are gathered straight into the bucket, in the engine's dtype; the memory that this takes while it runs
does not grow with the model (:func:`~rlightning.distributed.gathering.gather_into`).
"""

import mmap
import os
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlightning.distributed.gathering import gather_into
from rlightning.distributed.platform import synchronize_stream
from rlightning.errors import EngineError

ALIGNMENT = 256
"""Bytes. Each tensor starts at a multiple of this, which suits every dtype and CUDA's wide copies."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor's place in a chunk: ``offset`` in bytes from the bucket's start."""

    name: str
    shape: tuple[int, ...]
    offset: int

    def view(self, bucket: Tensor, dtype: torch.dtype) -> Tensor:
        """The tensor, in place, in the uint8 ``bucket``."""
        size = dtype.itemsize
        for length in self.shape:
            size *= length
        return bucket[self.offset : self.offset + size].view(dtype).view(self.shape)


def plan_chunks(
    shapes: Iterable[tuple[str, tuple[int, ...]]], dtype: torch.dtype, bucket_bytes: int
) -> tuple[list[list[Slot]], int]:
    """Cut tensors, in their order, into chunks that fit the bucket.

    Args:
        shapes: name and shape of every tensor.
        dtype: what they travel in.
        bucket_bytes: the size aimed at; a single larger tensor makes the bucket larger.

    Returns:
        The chunks, and the bucket's size in bytes.
    """
    chunks: list[list[Slot]] = [[]]
    offset = largest = 0
    for name, shape in shapes:
        size = dtype.itemsize * torch.Size(shape).numel()
        if chunks[-1] and offset + size > bucket_bytes:
            chunks.append([])
            offset = 0
        chunks[-1].append(Slot(name, shape, offset))
        largest = max(largest, offset + size)
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return chunks, max(largest, 1)


class WeightBucket:
    """The trainer's end: memory that an engine on the same host can open.

    Args:
        shapes: name and full shape of every weight, in the order in which they will be sent.
        dtype: the engine's.
        device: where the engine is: the CPU, or the CUDA device that the actor is on too.
        bucket_bytes: see :func:`plan_chunks`.
    """

    def __init__(
        self,
        shapes: Iterable[tuple[str, tuple[int, ...]]],
        dtype: torch.dtype,
        device: torch.device,
        bucket_bytes: int,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.chunks, num_bytes = plan_chunks(shapes, dtype, bucket_bytes)
        self._fd: int | None = None
        if device.type == "cuda":
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        else:
            self._fd = os.memfd_create("rlightning-weights")
            os.ftruncate(self._fd, num_bytes)
            self._bytes = torch.frombuffer(mmap.mmap(self._fd, num_bytes), dtype=torch.uint8)

    def handle(self) -> bytes:
        """What :func:`open_bucket` needs in the engine's worker."""
        where: Any
        if self._fd is None:
            from torch.multiprocessing.reductions import reduce_tensor

            where = reduce_tensor(self._bytes)
        else:
            where = (os.getpid(), self._fd, self._bytes.numel())
        return pickle.dumps((self.chunks, self.dtype, where))

    @torch.no_grad()
    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[int]:
        """Copy ``weights`` into the bucket, chunk by chunk; of each chunk's, no more are taken than fit into it.

        Args:
            weights: plain or sharded. All ranks that hold shards fill their buckets, with the same weights in the same
                order and chunks of the same size, because they gather together.

        Yields:
            The index of the chunk that is in the bucket now; its bytes stay until the iterator goes on.
        """
        source = iter(weights)
        for index, chunk in enumerate(self.chunks):
            gather_into([slot.view(self._bytes, self.dtype) for slot in chunk], _take(source, chunk))
            # The engine reads from another process, whose streams know nothing of this one's.
            synchronize_stream(self.device)
            yield index
        for name, _ in source:
            raise _changed("nothing more", name)

    def close(self) -> None:
        """Give the memory back. The engine must be done with it."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _take(source: Iterator[tuple[str, Tensor]], chunk: list[Slot]) -> list[Tensor]:
    """The next weights, which must be the chunk's."""
    tensors = []
    for slot in chunk:
        name, tensor = next(source, ("nothing", None))
        if tensor is None or name != slot.name or tuple(tensor.shape) != slot.shape:
            got = name if tensor is None else f"{name} {tuple(tensor.shape)}"
            raise _changed(f"{slot.name} {slot.shape}", got)
        tensors.append(tensor)
    return tensors


def _changed(expected: str, got: str) -> EngineError:
    return EngineError(
        f"The actor's weights changed between two syncs: expected {expected}, got {got}. "
        "Another architecture needs another engine."
    )


def open_bucket(handle: bytes, device: torch.device) -> tuple[list[list[Slot]], torch.dtype, Tensor]:
    """The engine's end of a :class:`WeightBucket`.

    Args:
        handle: from :meth:`WeightBucket.handle`.
        device: the worker's; the same physical device as the sender's, under whatever index it has here.

    Returns:
        The chunks, their dtype, and the bucket as uint8.
    """
    chunks, dtype, where = pickle.loads(handle)
    if device.type == "cuda":
        rebuild, arguments = where
        rebuilt = list(arguments)
        rebuilt[6] = device.index  # rebuild_cuda_tensor's storage_device, which is the sender's index
        return chunks, dtype, rebuild(*rebuilt)
    pid, fd, num_bytes = where
    with open(f"/proc/{pid}/fd/{fd}", "r+b") as file:
        return chunks, dtype, torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)
