"""Weights to send to engines: by name, in chunks that fit into one flat bucket.

Sharded weights are gathered directly into the bucket, in the engine's dtype; temporary memory does not grow with the
model (:func:`~rlightning.parallel.gathering.gather_into`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from rlightning.errors import EngineError
from rlightning.protocols import HasAdapter

ALIGNMENT = 256
"""Alignment in bytes of each tensor, which suits every dtype and CUDA's wide copies."""


class WeightSource(Protocol):
    """An object with weights to send, such as a :class:`~rlightning.module.policy_module.PolicyModule`."""

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Yield names and weights, whole or sharded; each call yields the same names and shapes in the same order."""


class AdapterSource:
    """An adapter's weights, followed by those of the frozen base model if an engine lacks them.

    Args:
        module: the module with the adapter.
        has_base: whether the base model's weights are yielded too; the same on all ranks.
    """

    def __init__(self, module: HasAdapter, *, has_base: bool = True) -> None:
        self.module, self.has_base = module, has_base

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapter's names and weights, then the base model's if ``has_base``."""
        yield from self.module.adapter_weights()
        if self.has_base:
            yield from self.module.base_weights()


class WeightShape(NamedTuple):
    """A weight's name, its full shape, and the dtype in which it is sent; None for the engine's dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor's position in the bucket; ``offset`` is in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def end(self) -> int:
        """The offset of the tensor's end in the bucket, in bytes."""
        return self.offset + self.dtype.itemsize * torch.Size(self.shape).numel()

    def view(self, bucket: Tensor) -> Tensor:
        """Return the tensor as a view of the uint8 ``bucket``."""
        return bucket[self.offset : self.end].view(self.dtype).view(self.shape)


class ChunkPlan(NamedTuple):
    """The division of tensors into chunks, and the bucket's size. Sender and receivers have the same plan.

    Attributes:
        chunks: the tensors of each chunk.
        num_bytes: size of the bucket in bytes.
        num_adapter_chunks: number of chunks at the beginning that contain an adapter, which may be sent alone; 0
            without an adapter.
        adapter: PEFT's settings of the adapter; None without one.
    """

    chunks: list[list[Slot]]
    num_bytes: int
    num_adapter_chunks: int = 0
    adapter: Mapping[str, object] | None = None

    def sent_chunks(self, source: WeightSource) -> list[list[Slot]]:
        """Return the chunks of a sync: all, or only the adapter's if the engines have the base model's weights."""
        is_adapter_alone = isinstance(source, AdapterSource) and not source.has_base
        return self.chunks[: self.num_adapter_chunks] if is_adapter_alone else self.chunks

    def match(self, source: WeightSource) -> Iterator[tuple[Slot, Tensor]]:
        """Yield each weight of a sync with its slot.

        Raises:
            EngineError: the source's weights are not those of the plan.
        """
        for slot, weight in zip_longest(chain.from_iterable(self.sent_chunks(source)), source.named_weights()):
            if slot is None or weight is None or weight[0] != slot.name or weight[1].shape != slot.shape:
                expected = "nothing more" if slot is None else f"{slot.name} {slot.shape}"
                got = "nothing" if weight is None else f"{weight[0]} {tuple(weight[1].shape)}"
                raise EngineError(
                    f"The actor's weights changed between two syncs: expected {expected}, got {got}. "
                    "Another architecture needs another engine."
                )
            yield slot, weight[1]

    def filled(self, bucket: Tensor, chunk: int) -> Tensor:
        """Return the part of the bucket that a chunk fills."""
        return bucket[: self.chunks[chunk][-1].end]

    def tensors(self, bucket: Tensor, chunk: int) -> Iterator[tuple[str, Tensor]]:
        """Yield a chunk's names and tensors, as views of the bucket."""
        return ((slot.name, slot.view(bucket)) for slot in self.chunks[chunk])


class ChunkViews:
    """The tensors of a plan's chunks, as views of its bucket. A view is created once, as 500 of them take 2 ms.

    Args:
        plan: plan of the weights.
        bucket: uint8 tensor of the plan's size.
    """

    def __init__(self, plan: ChunkPlan, bucket: Tensor) -> None:
        self.bucket, self._plan = bucket, plan
        self._views: dict[int, list[tuple[str, Tensor]]] = {}

    def tensors(self, chunk: int) -> Sequence[tuple[str, Tensor]]:
        """Return a chunk's names and tensors."""
        if chunk not in self._views:
            self._views[chunk] = list(self._plan.tensors(self.bucket, chunk))
        return self._views[chunk]


def weight_shapes(source: WeightSource) -> list[WeightShape]:
    """Return the shapes of a source's weights; a buffer, such as a router's biases, keeps its dtype.

    Such biases decide between experts with close scores, and vLLM stores them in float32.
    """
    return [
        WeightShape(name, tuple(tensor.shape), None if isinstance(tensor, nn.Parameter) else tensor.dtype)
        for name, tensor in source.named_weights()
    ]


def plan_chunks(
    shapes: Iterable[WeightShape | tuple[str, tuple[int, ...]]], dtype: torch.dtype, bucket_bytes: int
) -> ChunkPlan:
    """Return the plan that divides tensors, in their order, into chunks that fit into a bucket.

    Args:
        shapes: the shape of every tensor, in the order in which they are sent.
        dtype: dtype in which tensors without their own dtype are sent.
        bucket_bytes: intended size of the bucket, which is larger if a tensor is.
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


def plan_source(source: WeightSource, dtype: torch.dtype, bucket_bytes: int) -> ChunkPlan:
    """Return the chunks of a source's weights; no chunk contains both adapter and base weights."""
    if not isinstance(source, AdapterSource):
        return plan_chunks(weight_shapes(source), dtype, bucket_bytes)
    module = source.module
    assert module.adapter is not None
    adapter, base = (
        plan_chunks([WeightShape(name, tuple(tensor.shape)) for name, tensor in weights], dtype, bucket_bytes)
        for weights in (module.adapter_weights(), module.base_weights())
    )
    return ChunkPlan(
        adapter.chunks + base.chunks,
        max(adapter.num_bytes, base.num_bytes),
        num_adapter_chunks=len(adapter.chunks),
        adapter=module.adapter.peft_settings(),
    )
