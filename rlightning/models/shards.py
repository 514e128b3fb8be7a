"""A rank's shard of a tensor."""

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
    rebuilt: Tensor = DTensor.__tensor_unflatten__(parts, layout, tensor.shape, tensor.stride())
    return rebuilt
