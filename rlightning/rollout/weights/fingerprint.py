"""Detects changed weights by a checksum of their bits."""

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

from rlightning.parallel.sharding import local_tensor

_BLOCK = 4096
_PART = 2048 * _BLOCK  # elements that are multiplied at once, 64 MiB of products
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightFingerprint:
    """Detects whether weights have changed since the last call, in any way.

    A checksum of each tensor's bits is kept. ``tensor._version`` does not suffice, since writes through ``.data`` do
    not change it; nor do addresses, since offloading changes them.
    """

    def __init__(self) -> None:
        self._known: list[int] | None = None

    def has_changed(self, weights: Iterable[tuple[str, Tensor]]) -> bool:
        """Return whether this rank's shards differ from those of the last call.

        False for the first call, and while the weights are offloaded to host memory.

        Args:
            weights: names, which are ignored, and tensors on any device.
        """
        tensors = [local_tensor(tensor) for _, tensor in weights]
        if any(tensor.numel() and not tensor.untyped_storage().nbytes() for tensor in tensors):
            return False  # offloaded to host memory, where nothing writes to them
        sums = [checksum(tensor) for tensor in tensors]
        known, self._known = self._known, torch.stack(sums).tolist() if sums else []
        return known is not None and known != self._known


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return a checksum of a tensor's bits that depends on their order, and is equal on all devices.

    Each element is multiplied by its own odd factor modulo 2^64: a change of one element always changes the checksum,
    and changes of several go undetected with probability 2^-32 or less. Products are summed over blocks, and block sums
    are weighted and summed in the same way, twice.

    Args:
        tensor: a tensor of any shape and dtype.

    Returns:
        A scalar of int64.
    """
    numbers = tensor.detach().contiguous().flatten().view(_INTEGERS[tensor.element_size()])
    for factors in _factors(tensor.device):
        sums = [numbers.new_zeros(0, dtype=torch.int64)]
        for part in numbers.split(_PART):
            blocks, rest = part.split([len(part) - len(part) % _BLOCK, len(part) % _BLOCK])
            sums += [(blocks.view(-1, _BLOCK) * factors).sum(1), (rest * factors[: len(rest)]).sum(0, keepdim=True)]
        numbers = torch.cat(sums)
    return numbers.sum()


@cache
def _factors(device: torch.device) -> Tensor:
    """Return random odd int64 factors [3, B] for :func:`checksum`, a row for each level of sums over ``B`` terms."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**62), 2**62, (3, _BLOCK), generator=generator)
    return (2 * drawn + 1).to(device)
