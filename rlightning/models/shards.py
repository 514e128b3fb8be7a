"""A rank's shard of a tensor: its values, and where they lie in the whole."""

import math

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_tensor(tensor: Tensor) -> Tensor:
    """A DTensor's part on this rank; a plain tensor is its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_local_tensor(tensor: Tensor, local: Tensor) -> Tensor:
    """A tensor like ``tensor``, with other values on this rank, which may be on another device than the mesh's."""
    if not isinstance(tensor, DTensor):
        return local
    names, layout = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names} | {"_local_tensor": local}
    return DTensor.__tensor_unflatten__(parts, layout, tensor.shape, tensor.stride())


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Where a DTensor's part on this rank lies in the whole.

    Tensor parallelism cuts first and FSDP cuts what is left, both as ``torch.chunk`` does.
    """
    bounds = [(0, size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        for dim in reversed(range(mesh.ndim)):
            placement = tensor.placements[dim]
            if not placement.is_replicate():
                axis = placement.dim  # type: ignore[attr-defined]
                bounds[axis] = chunk_bounds(*bounds[axis], mesh.size(dim), coordinate[dim])
    return tuple(slice(*bound) for bound in bounds)


def chunk_bounds(start: int, stop: int, num_chunks: int, index: int) -> tuple[int, int]:
    """The range of one chunk, as ``torch.chunk`` cuts ``start`` to ``stop``; the last ones may be short or empty."""
    size = math.ceil((stop - start) / num_chunks)
    return min(start + index * size, stop), min(start + (index + 1) * size, stop)
