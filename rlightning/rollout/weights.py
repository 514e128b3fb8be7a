"""The actor's weights on their way to engines: one flat bucket, filled and emptied as often as the model needs.

The trainer holds a :class:`SendingEnd`, each of the engines' workers a :class:`ReceivingEnd`. Between them is one of:

==================  ==================================================================================================
WeightBucket        the same memory, opened by both: a memory file on the CPU, by an IPC handle on one CUDA device
BroadcastBucket     a process group of their own: NCCL between CUDA devices, gloo between CPUs
FolderBucket        safetensors files, on a disk that all see
==================  ==================================================================================================

One sync, once the ends are connected::

    for index in sending_end.fill(weights):     ask each engine to load chunk `index`
                                                sending_end.send(index)
                                                wait until all have loaded it

Sharded weights are gathered straight into the bucket, in the engine's dtype; the memory that this takes while it runs
does not grow with the model (:func:`~rlightning.parallel.gathering.gather_into`).
"""

import mmap
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from rlightning.errors import EngineError
from rlightning.parallel.device import shareable_memory, synchronize_stream
from rlightning.parallel.gathering import gather_into


class WeightShape(NamedTuple):
    """A weight's name and full shape, and the dtype that it travels in; None is the engine's."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


Shapes = Iterable[WeightShape | tuple[str, tuple[int, ...]]]
"""Of every weight, in the order in which they are sent."""
Weights = Iterable[tuple[str, Tensor]]
"""Names and weights, whole or sharded, in that order."""

ALIGNMENT = 256
"""Bytes. Each tensor starts at a multiple of this, which suits every dtype and CUDA's wide copies."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor's place in a chunk: ``offset`` in bytes from the bucket's start.

    ``dtype`` is the tensor's own, where it is not that of the bucket, which the methods are given.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    dtype: torch.dtype | None = None

    def end(self, dtype: torch.dtype) -> int:
        """Where the tensor ends, in bytes from the bucket's start."""
        return self.offset + (self.dtype or dtype).itemsize * torch.Size(self.shape).numel()

    def view(self, bucket: Tensor, dtype: torch.dtype) -> Tensor:
        """The tensor, in place, in the uint8 ``bucket``."""
        return bucket[self.offset : self.end(dtype)].view(self.dtype or dtype).view(self.shape)


def weight_shapes(weights: Weights) -> list[WeightShape]:
    """Return what is to be sent of weights; what is no parameter, as a router's biases, keeps its dtype.

    They decide between experts whose scores are close together, and vLLM has them in float32.
    """
    return [
        WeightShape(name, tuple(tensor.shape), None if isinstance(tensor, nn.Parameter) else tensor.dtype)
        for name, tensor in weights
    ]


def plan_chunks(shapes: Shapes, dtype: torch.dtype, bucket_bytes: int) -> tuple[list[list[Slot]], int]:
    """Cut tensors, in their order, into chunks that fit the bucket.

    Args:
        shapes: of every tensor.
        dtype: what they travel in, but for those with one of their own.
        bucket_bytes: the size aimed at; a single larger tensor makes the bucket larger.

    Returns:
        The chunks, and the bucket's size in bytes.
    """
    chunks: list[list[Slot]] = [[]]
    offset = largest = 0
    for entry in shapes:
        name, shape, own = WeightShape(*entry)
        size = (own or dtype).itemsize * torch.Size(shape).numel()
        if chunks[-1] and offset + size > bucket_bytes:
            chunks.append([])
            offset = 0
        chunks[-1].append(Slot(name, shape, offset, own))
        largest = max(largest, offset + size)
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return chunks, max(largest, 1)


class SendingEnd(Protocol):
    """What the trainer sends weights with. All but :meth:`interrupt` is called by one thread."""

    def handles(self, groups: Sequence[int]) -> list[bytes]:
        """What each worker needs for :func:`open_end`. Called for each new set of engines; the set before is left.

        Args:
            groups: for each worker a number that no other worker on its device has.
        """

    def connect(self) -> None:
        """Return when all workers are connected. Called after they have been asked to open their ends.

        Raises:
            EngineError: if one of them does not come.
        """

    def fill(self, weights: Weights) -> Iterator[int]:
        """Bring ``weights`` into the bucket, chunk by chunk; of each chunk's, no more are taken than fit into it.

        Yields:
            The index of the chunk that may be sent now; it stays until the iterator goes on.
        """

    def send(self, index: int) -> None:
        """Hand over the chunk that is in the bucket. Called after the workers have been asked to load it.

        Raises:
            EngineError: if one of them does not take it. The others hold half of the weights then: they are given new
                :meth:`handles`, and all of the weights.
        """

    def interrupt(self, reason: str) -> None:
        """Let :meth:`connect` or :meth:`send`, now or next, fail for ``reason``. Any thread may call it."""

    def close(self) -> None:
        """Give everything back. The engines must be done with it. May be called twice."""


class ReceivingEnd(Protocol):
    """What an engine's worker receives weights with."""

    @property
    def num_chunks(self) -> int:
        """Of all weights."""

    def receive(self, index: int) -> Iterator[tuple[str, Tensor]]:
        """Wait for a chunk; its names and tensors, which may be read until the worker has told that it has loaded them.

        Raises:
            EngineError: if it does not come.
        """

    def close(self) -> None:
        """Leave, for another end to be opened."""


def open_end(handle: bytes, device: torch.device) -> ReceivingEnd:
    """The worker's end; returns when it is connected.

    Args:
        handle: from :meth:`SendingEnd.handles`.
        device: the worker's.
    """
    way, *arguments = pickle.loads(handle)
    end: ReceivingEnd = way(device, *arguments)
    return end


@torch.no_grad()
def gather_chunks(
    chunks: Iterable[list[Slot]],
    output: Callable[[Slot], Tensor],
    weights: Weights,
    *,
    device: torch.device,
    destination: int | None = None,
) -> Iterator[int]:
    """Copy or gather ``weights`` into the bucket, chunk by chunk.

    Args:
        chunks: what is in the bucket at a time.
        output: a slot's place in the bucket.
        weights: plain or sharded. All ranks that hold shards gather the same weights, in the same order and chunks.
        device: the bucket's.
        destination: the one rank that gets the values; all do by default.

    Yields:
        The index of the chunk that is in the bucket now.
    """
    source = iter(weights)
    for index, chunk in enumerate(chunks):
        gather_into([output(slot) for slot in chunk], _take(source, chunk), destination=destination)
        # Who reads the bucket knows nothing of this process's streams.
        synchronize_stream(device)
        yield index
    for name, _ in source:
        raise _changed("nothing more", name)


class ShardGiver:
    """In the place of a :class:`SendingEnd`, on a rank without engines: it has no bucket, but shards to give.

    Args:
        shapes, dtype, bucket_bytes: as the ``destination``'s.
        destination: the rank whose bucket is filled.
    """

    def __init__(self, shapes: Shapes, dtype: torch.dtype, bucket_bytes: int, *, destination: int) -> None:
        self.dtype = dtype
        self.destination = destination
        self.chunks, _ = plan_chunks(shapes, dtype, bucket_bytes)

    def fill(self, weights: Weights) -> Iterator[int]:
        """Take part in the ``destination``'s :meth:`SendingEnd.fill`. Yields the chunks' indices, too."""
        return gather_chunks(
            self.chunks,
            lambda slot: torch.empty(slot.shape, dtype=slot.dtype or self.dtype, device="meta"),
            weights,
            device=torch.device("cpu"),
            destination=self.destination,
        )


class WeightBucket:
    """The trainer's end: memory that an engine on the same host can open.

    All ranks that hold shards have a bucket of their own, and fill it at the same time.

    Args:
        shapes: see :data:`Shapes`.
        dtype: the engine's.
        device: where the engine is: the CPU, or the CUDA device that the actor is on too.
        bucket_bytes: see :func:`plan_chunks`.
        destination: this rank, if it alone has a bucket and the others give their shards by :class:`ShardGiver`.
    """

    def __init__(
        self,
        shapes: Shapes,
        dtype: torch.dtype,
        device: torch.device,
        bucket_bytes: int,
        *,
        destination: int | None = None,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.destination = destination
        self.chunks, num_bytes = plan_chunks(shapes, dtype, bucket_bytes)
        self._fd: int | None = None
        if device.type == "cuda":
            with shareable_memory():
                self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        else:
            self._fd = os.memfd_create("rlightning-weights")
            os.ftruncate(self._fd, num_bytes)
            self._bytes = torch.frombuffer(mmap.mmap(self._fd, num_bytes), dtype=torch.uint8)

    def handle(self) -> bytes:
        """What :func:`open_end` needs in an engine's worker, in any of them."""
        where: Any
        if self._fd is None:
            from torch.multiprocessing.reductions import reduce_tensor

            where = reduce_tensor(self._bytes)
        else:
            where = (os.getpid(), self._fd, self._bytes.numel())
        return pickle.dumps((_open_shared, self.chunks, self.dtype, where))

    def handles(self, groups: Sequence[int]) -> list[bytes]:
        """See :meth:`SendingEnd.handles`."""
        return [self.handle()] * len(groups)

    def connect(self) -> None:
        """Nothing is left to do once the workers have opened the memory."""

    def fill(self, weights: Weights) -> Iterator[int]:
        """See :meth:`SendingEnd.fill`."""
        yield from gather_chunks(
            self.chunks,
            lambda slot: slot.view(self._bytes, self.dtype),
            weights,
            device=self.device,
            destination=self.destination,
        )

    def send(self, index: int) -> None:
        """The workers see the bucket."""

    def interrupt(self, reason: str) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """See :meth:`SendingEnd.close`."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _take(source: Iterator[tuple[str, Tensor]], chunk: Sequence[Slot]) -> list[Tensor]:
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


class SharedEnd(NamedTuple):
    """The :class:`ReceivingEnd` of a :class:`WeightBucket`; ``memory`` is the bucket as uint8."""

    chunks: list[list[Slot]]
    dtype: torch.dtype
    memory: Tensor

    @property
    def num_chunks(self) -> int:
        """See :class:`ReceivingEnd`."""
        return len(self.chunks)

    def receive(self, index: int) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`ReceivingEnd.receive`."""
        return ((slot.name, slot.view(self.memory, self.dtype)) for slot in self.chunks[index])

    def close(self) -> None:
        """The memory goes with the last tensor that lies in it."""


def open_bucket(handle: bytes, device: torch.device) -> SharedEnd:
    """The engine's end of a :class:`WeightBucket`.

    Args:
        handle: from :meth:`WeightBucket.handle`.
        device: the worker's; the same physical device as the sender's, under whatever index it has here.
    """
    end = open_end(handle, device)
    assert isinstance(end, SharedEnd)
    return end


def _open_shared(device: torch.device, chunks: list[list[Slot]], dtype: torch.dtype, where: Any) -> SharedEnd:
    if device.type == "cuda":
        rebuild, arguments = where
        rebuilt = list(arguments)
        rebuilt[6] = device.index  # rebuild_cuda_tensor's storage_device, which is the sender's index
        return SharedEnd(chunks, dtype, rebuild(*rebuilt))
    pid, fd, num_bytes = where
    with open(f"/proc/{pid}/fd/{fd}", "r+b") as file:
        return SharedEnd(chunks, dtype, torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8))
