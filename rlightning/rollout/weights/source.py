"""What is sent to engines: an actor's weights by name, in chunks that fit one flat bucket.

Sharded weights are gathered straight into the bucket, in the engine's dtype; the memory that this takes while it runs
does not grow with the model (:func:`~rlightning.parallel.gathering.gather_into`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from rlightning.errors import EngineError
from rlightning.parallel.device import synchronize_stream
from rlightning.parallel.gathering import gather_into

ALIGNMENT = 256
"""Bytes. Each tensor starts at a multiple of this, which suits every dtype and CUDA's wide copies."""


class WeightSource(Protocol):
    """Has weights to send, as a :class:`~rlightning.module.policy_module.PolicyModule` has its actor's."""

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Yield names and weights, whole or sharded; each call yields the same names and shapes in the same order."""


class WeightShape(NamedTuple):
    """A weight's name and full shape, and the dtype that it is sent in; None is the engine's."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor's place in the bucket; ``offset`` is in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def end(self) -> int:
        """Where the tensor ends, in bytes from the bucket's start."""
        return self.offset + self.dtype.itemsize * torch.Size(self.shape).numel()

    def view(self, bucket: Tensor) -> Tensor:
        """The tensor, in place, in the uint8 ``bucket``."""
        return bucket[self.offset : self.end].view(self.dtype).view(self.shape)


class ChunkPlan(NamedTuple):
    """Which tensors are in the bucket at a time, and the bucket's size in bytes. Sender and receivers have the same."""

    chunks: list[list[Slot]]
    num_bytes: int

    def filled(self, bucket: Tensor, chunk: int) -> Tensor:
        """The part of the bucket that a chunk fills."""
        return bucket[: self.chunks[chunk][-1].end]

    def tensors(self, bucket: Tensor, chunk: int) -> Iterator[tuple[str, Tensor]]:
        """A chunk's names and tensors, in place, in the bucket."""
        return ((slot.name, slot.view(bucket)) for slot in self.chunks[chunk])


def weight_shapes(source: WeightSource) -> list[WeightShape]:
    """Return the shapes of a source's weights; what is no parameter, as a router's biases, keeps its dtype.

    Such biases decide between experts whose scores are close together, and vLLM has them in float32.
    """
    return [
        WeightShape(name, tuple(tensor.shape), None if isinstance(tensor, nn.Parameter) else tensor.dtype)
        for name, tensor in source.named_weights()
    ]


def plan_chunks(
    shapes: Iterable[WeightShape | tuple[str, tuple[int, ...]]], dtype: torch.dtype, bucket_bytes: int
) -> ChunkPlan:
    """Cut tensors, in their order, into chunks that fit the bucket.

    Args:
        shapes: of every tensor, in the order in which they are sent.
        dtype: what they are sent in, but for those with a dtype of their own.
        bucket_bytes: the size aimed at; a single larger tensor makes the bucket larger.
    """
    chunks: list[list[Slot]] = [[]]
    offset = largest = 0
    for entry in shapes:
        name, shape, own_dtype = WeightShape(*entry)
        slot = Slot(name, shape, own_dtype or dtype, offset)
        if chunks[-1] and slot.end > bucket_bytes:
            chunks.append([])
            slot = Slot(name, shape, slot.dtype, 0)
        chunks[-1].append(slot)
        largest = max(largest, slot.end)
        offset = -(-slot.end // ALIGNMENT) * ALIGNMENT
    return ChunkPlan(chunks, max(largest, 1))


@torch.no_grad()
def fill_bucket(
    plan: ChunkPlan, bucket: Tensor, source: WeightSource, *, destination: int | None = None
) -> Iterator[int]:
    """Copy or gather a source's weights into the bucket, chunk by chunk.

    Args:
        plan: of the source's weights.
        bucket: uint8, of the plan's size; on the meta device on a rank that only gives its shards.
        source: all ranks that hold shards gather the same weights, in the same order and chunks.
        destination: the one rank that gets the values; all do by default.

    Yields:
        The index of the chunk that is in the bucket until the iterator goes on.

    Raises:
        EngineError: the source's weights are not those of the plan.
    """
    weights = iter(source.named_weights())
    for index, chunk in enumerate(plan.chunks):
        tensors = _take(weights, chunk)
        gather_into([slot.view(bucket) for slot in chunk], tensors, destination=destination)
        # Another process reads the bucket, which this process's streams do not order.
        synchronize_stream(bucket.device)
        yield index
    for name, _ in weights:
        raise _changed("nothing more", name)


def _take(weights: Iterator[tuple[str, Tensor]], chunk: Sequence[Slot]) -> list[Tensor]:
    """The next weights, which must be the chunk's."""
    tensors = []
    for slot in chunk:
        name, tensor = next(weights, ("nothing", None))
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
