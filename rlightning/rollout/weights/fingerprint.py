"""Detects changed weights by a checksum of their bits."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from rlightning.parallel.sharding import local_tensor

_BLOCK = 4096
_PART = 2048 * _BLOCK  # elements that are multiplied at once, 64 MiB of products
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightFingerprint:
    """Detects whether weights have changed since the last call, in any way.

    A checksum of all tensors' bits is kept. ``tensor._version`` does not suffice, since writes through ``.data`` do
    not change it; nor do addresses, since offloading changes them.
    """

    def __init__(self) -> None:
        self._known: int | None = None

    def has_changed(self, weights: Iterable[tuple[str, Tensor]]) -> bool:
        """Return whether this rank's shards differ from those of the last call.

        False for the first call, and while the weights are offloaded to host memory.

        Args:
            weights: names, which are ignored, and tensors on any device.
        """
        tensors = [local_tensor(tensor) for _, tensor in weights]
        if any(tensor.numel() and not tensor.untyped_storage().nbytes() for tensor in tensors):
            return False  # offloaded to host memory, where nothing writes to them
        known, self._known = self._known, int(checksum(tensors))
        return known is not None and known != self._known


@torch.no_grad()
def checksum(tensors: Sequence[Tensor]) -> Tensor:
    """Return a checksum of the bits of tensors that depends on their order, and is equal on all devices.

    Each element is multiplied by its own odd factor modulo 2^64: a change of one element always changes the checksum,
    and changes of several go undetected with probability 2^-32 or less. Products are summed over blocks of each tensor,
    and the block sums of all tensors are weighted and summed in the same way, twice.

    Args:
        tensors: tensors of any shape and dtype, on one device.

    Returns:
        A scalar of int64.
    """
    numbers = torch.zeros(0, dtype=torch.int64)
    parts = [tensor.detach().contiguous().flatten().view(_INTEGERS[tensor.element_size()]) for tensor in tensors]
    for level in range(3):
        sums = [block_sum for part in parts for block_sum in _block_sums(part, _factors(part.device)[level])]
        numbers = torch.cat(sums) if sums else numbers
        parts = [numbers]
    return numbers.sum()


def _block_sums(numbers: Tensor, factors: Tensor) -> Iterator[Tensor]:
    """Yield the weighted sums of blocks of integers, in several tensors."""
    for part in numbers.split(_PART):
        whole = len(part) - len(part) % _BLOCK
        if whole:
            yield (part[:whole].view(-1, _BLOCK) * factors).sum(1)
        if whole < len(part):
            yield (part[whole:] * factors[: len(part) - whole]).sum(0, keepdim=True)


@cache
def _factors(device: torch.device) -> Tensor:
    """Return random odd int64 factors [3, B] for :func:`checksum`, a row for each level of sums over ``B`` terms."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**62), 2**62, (3, _BLOCK), generator=generator)
    return (2 * drawn + 1).to(device)
