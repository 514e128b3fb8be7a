"""Gathers the full values of sharded parameters: one all-gather for many tensors, directly into plain tensors.

``DTensor.full_tensor()`` needs one collective a parameter, in the parameter's dtype. Here the shards of many parameters
are packed into one buffer in the outputs' dtypes, gathered in one collective, and copied to the outputs::

    rank 0   [ a's rows 0-2 | b's rows 0-1 | .. ]  \\                       / output a   rows 0-2 | rows 3-4
                                                    >  one all-gather  -> <
    rank 1   [ a's rows 3-4 | b's row 2    | .. ]  /                       \\ output b   rows 0-1 | row 2

Supported are the tensors of FSDP2 and tensor parallelism: meshes of any number of dimensions, each of which replicates
or splits a tensor. Replicas are not sent: a tensor is gathered among ranks that hold different parts of it.

Letters: ``g`` ranks that hold different parts.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from rlightning.torch_internals import StridedShard, all_gather_single, copy_tensors

T = TypeVar("T")

GATHER_BYTES = 256 << 20
"""Maximum bytes of full values in one collective, unless a single tensor is larger."""
ALIGNMENT = 16
"""Alignment in bytes of each shard in its buffer, which suits every dtype."""


@dataclass(frozen=True, slots=True)
class Box:
    """The slice of a full tensor that one rank holds: its first index and its length in each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements in the slice."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the slice in a tensor of the full shape."""
        return tuple(slice(start, start + length) for start, length in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a DTensor is sharded: its mesh and placements. Tensors of one layout are gathered in one collective."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    @property
    def split_dims(self) -> tuple[int, ...]:
        """The indices of the mesh dimensions over which the tensor is sharded, in the order in which they split it.

        FSDP splits what tensor parallelism has already split: a strided shard comes after the plain shard to its right.
        """
        plain = [i for i, placement in enumerate(self.placements) if type(placement) is Shard]
        strided = [i for i, placement in enumerate(self.placements) if isinstance(placement, StridedShard)]
        return (*plain, *strided)

    @classmethod
    def of(cls, tensor: DTensor) -> Self:
        """Return how a DTensor is sharded."""
        return cls(tensor.device_mesh, tuple(tensor.placements))

    def check(self) -> None:
        """Raise a NotImplementedError for placements that neither FSDP nor tensor parallelism creates."""
        for index, placement in enumerate(self.placements):
            is_known = placement.is_replicate() or type(placement) is Shard
            if isinstance(placement, StridedShard):
                after = [i for i in self.split_dims if i > index and self.placements[i].is_shard(placement.dim)]
                is_known = math.prod(self.mesh.size(i) for i in after) == placement.split_factor
            if not is_known:
                raise NotImplementedError(
                    f"A tensor placed as {self.placements} on a mesh of {tuple(self.mesh.shape)} cannot be gathered."
                )

    def box(self, coordinate: Sequence[int], shape: Sequence[int]) -> Box:
        """Return the slice of a tensor of full ``shape`` that the rank at ``coordinate`` in the mesh holds."""
        offset, lengths = [0] * len(shape), list(shape)
        for mesh_dim in self.split_dims:
            dim = self.placements[mesh_dim].dim  # type: ignore[attr-defined]
            size = -(-lengths[dim] // self.mesh.size(mesh_dim))  # as torch.chunk(): the last ranks get less, or none
            start = min(coordinate[mesh_dim] * size, lengths[dim])
            offset[dim] += start
            lengths[dim] = min(size, lengths[dim] - start)
        return Box(tuple(offset), tuple(lengths))

    def holders(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return the ranks, with mesh coordinates, whose shards form one copy of the tensor, this rank included."""
        mine = self.mesh.get_coordinate()
        assert mine is not None, "this rank holds no part of the tensor"
        ranks = self.mesh.mesh
        coordinates: list[tuple[int, ...]] = [tuple(mine)]
        for mesh_dim in sorted(self.split_dims):
            coordinates = [
                (*c[:mesh_dim], i, *c[mesh_dim + 1 :]) for c in coordinates for i in range(self.mesh.size(mesh_dim))
            ]
        return sorted((int(ranks[coordinate]), coordinate) for coordinate in coordinates)


def local_box(tensor: DTensor) -> Box:
    """Return which slice of the full tensor this rank's shard is."""
    layout = _Layout.of(tensor)
    layout.check()
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank holds no part of the tensor"
    return layout.box(coordinate, tensor.shape)


def local_part(whole: Tensor, like: Tensor) -> Tensor:
    """Return the slice of a full tensor that this rank would hold if it were sharded as ``like``; a view.

    If ``like`` is not sharded, return ``whole``.
    """
    return whole[local_box(like).slices] if isinstance(like, DTensor) else whole


def split_by_bytes(items: Iterable[T], size_of: Callable[[T], int], max_bytes: float) -> Iterator[list[T]]:
    """Yield the items, in their order, in lists of at most ``max_bytes``; a larger item is in a list by itself."""
    part: list[T] = []
    num_bytes = 0
    for item in items:
        size = size_of(item)
        if part and num_bytes + size > max_bytes:
            yield part
            part, num_bytes = [], 0
        part.append(item)
        num_bytes += size
    if part:
        yield part


@torch.no_grad()
def gather_into(
    outputs: Sequence[Tensor],
    tensors: Sequence[Tensor],
    *,
    destination: int | None = None,
    gather_bytes: int = GATHER_BYTES,
) -> None:
    """Gather the full values of sharded ``tensors`` into plain tensors, ``outputs``; a collective.

    All ranks that hold parts of the tensors call this with the same tensors, in the same order. Tensors that are not
    sharded are copied. Temporary memory is that for the values of one collective, in the outputs' dtype, and for this
    rank's part: at most ``(1 + 1 / g) * max(gather_bytes, the largest tensor)`` bytes if parts are of equal size. A
    rank other than ``destination`` needs memory only for its part.

    Args:
        outputs: for each tensor a plain tensor of its full shape, of any dtype, on any device.
        tensors: sharded tensors, on the devices of their mesh or, if offloaded, on the CPU; or plain tensors.
        destination: the rank that gets the values; None for all ranks. The outputs of other ranks only provide the
            dtype, and may be on the meta device.
        gather_bytes: maximum bytes of full values in one collective, unless a single tensor is larger.
    """
    is_wanted = destination is None or not dist.is_initialized() or dist.get_rank() == destination
    sharded: dict[_Layout, list[tuple[Tensor, DTensor]]] = {}
    plain: list[tuple[Tensor, Tensor]] = []
    for output, tensor in zip(outputs, tensors, strict=True):
        if isinstance(tensor, DTensor):
            # tensors on the same ranks are gathered together, whichever of their dimensions is split
            layout = _Layout.of(tensor)
            sharded.setdefault(layout, []).append((output, tensor))
        elif is_wanted:
            plain.append((output, tensor))
    copy_tensors([output for output, _ in plain], [tensor for _, tensor in plain])
    by_ranks: dict[tuple[int, ...], list[tuple[Tensor, DTensor]]] = {}
    for layout, pairs in sharded.items():
        layout.check()
        by_ranks.setdefault(tuple(rank for rank, _ in layout.holders()), []).extend(pairs)
    for ranks, pairs in by_ranks.items():
        if destination is None or destination in ranks:
            for window in split_by_bytes(pairs, _num_bytes, gather_bytes):
                _gather_window(ranks, window, destination)


def _num_bytes(pair: tuple[Tensor, DTensor]) -> int:
    output, tensor = pair
    return tensor.numel() * output.dtype.itemsize


def _gather_window(ranks: tuple[int, ...], pairs: list[tuple[Tensor, DTensor]], destination: int | None) -> None:
    """Gather those tensors whose values fit into one buffer, by one collective."""
    rank = dist.get_rank()
    mine = ranks.index(rank)
    boxes = [_boxes(tensor) for _, tensor in pairs]  # [tensor][holder]
    # A tensor's part has the same place in all ranks' buffers. This takes no more: the first rank's are the largest.
    sizes = [
        max(box.numel for box in parts) * output.dtype.itemsize for parts, (output, _) in zip(boxes, pairs, strict=True)
    ]
    *offsets, share = accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)
    device = pairs[0][1].device_mesh.device_type  # this process's current one, to which offloaded shards are copied
    sent = torch.empty(share, dtype=torch.uint8, device=device)
    for (output, tensor), parts, offset in zip(pairs, boxes, offsets, strict=True):
        box, local = parts[mine], tensor.to_local()
        assert local.shape == box.shape, f"{tuple(local.shape)} is held, {box.shape} is expected"
        _slot(sent, offset, box, output.dtype).copy_(local)
    if len(ranks) == 1:
        received = sent[None]
    elif destination is None:
        received = torch.empty(len(ranks), share, dtype=torch.uint8, device=device)
        all_gather_single(received.view(-1), sent, group=_group(pairs[0][1], ranks))
    else:
        shape = (len(ranks) if rank == destination else 0, share)
        received = torch.empty(shape, dtype=torch.uint8, device=device)
        into = list(received) if rank == destination else None
        dist.gather(sent, into, dst=destination, group=_group(pairs[0][1], ranks))
    for holder, row in enumerate(received):
        held = [
            (output, parts[holder], offset) for (output, _), parts, offset in zip(pairs, boxes, offsets, strict=True)
        ]
        copy_tensors(
            [output[box.slices] for output, box, _ in held],
            [_slot(row, offset, box, output.dtype) for output, box, offset in held],
        )


def _boxes(tensor: DTensor) -> list[Box]:
    """Return offset and shape of each rank's shard of one copy of ``tensor``, in the order of ranks."""
    layout = _Layout.of(tensor)
    return [layout.box(coordinate, tensor.shape) for _, coordinate in layout.holders()]


def _slot(buffer: Tensor, offset: int, box: Box, dtype: torch.dtype) -> Tensor:
    return buffer[offset : offset + box.numel * dtype.itemsize].view(dtype).view(box.shape)


_groups: dict[tuple[int, ...], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
"""Process groups created here, by their ranks, each with the default group at that time."""


def _group(tensor: DTensor, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Return a process group of ``ranks`` in this order: a group of the mesh, the default group, or a new one."""
    layout = _Layout.of(tensor)
    if len(layout.split_dims) == 1:
        group = tensor.device_mesh.get_group(layout.split_dims[0])
        if tuple(dist.get_process_group_ranks(group)) == ranks:
            return group
    world = dist.group.WORLD
    assert world is not None
    if tuple(dist.get_process_group_ranks(world)) == ranks:
        return world
    # Shards of tensor-parallel ranks below a replicating dimension. Only these ranks create the group.
    if ranks not in _groups or _groups[ranks][0] is not world:
        made = dist.new_group(list(ranks), use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        _groups[ranks] = world, made
    return _groups[ranks][1]
