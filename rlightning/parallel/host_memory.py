"""Moves tensors' storage to host memory and back, without replacing the tensor objects."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, UntypedStorage

from rlightning.parallel.device import empty_cache, host_bytes, synchronize, synchronize_stream
from rlightning.torch_internals import inner_tensors, is_traceable_wrapper_subclass

BLOCK_BYTES = 256 << 20
"""Bytes of a block of page-locked memory: torch rounds up to powers of two, so that a large buffer wastes more."""
_ALIGNMENT = 512


class HostMemory:
    """Moves tensors' data from devices to host memory, which frees device memory, and back.

    A storage is copied to the host and resized to 0; later it is resized and filled again. Tensors, parameters, views,
    DTensors and FSDP's shards stay the same objects. Reading them in between would crash the process. Shared storages
    are moved once. The host memory is kept for the next time.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._moved: list[tuple[UntypedStorage, int, int]] = []
        self._end = 0

    @property
    def num_bytes(self) -> int:
        """Number of bytes that are now in host memory."""
        return sum(size for _, _, size in self._moved)

    def take(self, tensors: Iterable[Tensor], device_type: str = "cuda") -> int:
        """Move the data of ``tensors`` on ``device_type`` devices to host memory; return the number of bytes moved."""
        storages = list(_unique_storages(tensors, device_type))
        for device in {storage.device for storage in storages}:
            synchronize(device)  # waits for every stream that still writes to them
        moved = []
        for storage in storages:
            start, size = self._end, storage.nbytes()
            for part, block in self._spans(storage, start, size):
                block.copy_(part, non_blocking=True)
            moved.append((storage, start, size))
            self._end = -(-(start + size) // _ALIGNMENT) * _ALIGNMENT
        for device in {storage.device for storage in storages}:
            synchronize_stream(device)
        for storage in storages:
            storage.resize_(0)
        for device in {storage.device for storage in storages}:
            empty_cache(device)
        self._moved += moved
        return sum(size for _, _, size in moved)

    def give_back(self) -> int:
        """Move all data back to its devices; return the number of bytes moved.

        Raises:
            torch.OutOfMemoryError: the device has too little memory; the remaining storages stay on the host for
                another call.
        """
        num_bytes = 0
        devices = {storage.device for storage, _, _ in self._moved}
        try:
            while self._moved:
                storage, start, size = self._moved[-1]
                storage.resize_(size)
                for part, block in self._spans(storage, start, size):
                    part.copy_(block, non_blocking=True)
                self._moved.pop()
                num_bytes += size
        finally:
            for device in devices:
                synchronize_stream(device)  # host memory may be overwritten, tensors read on any stream
        self._end = 0
        return num_bytes

    def close(self) -> None:
        """Move all data back to its devices, and free the host memory. May be called twice."""
        self.give_back()
        self._blocks.clear()

    def _spans(self, storage: UntypedStorage, start: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield slices of a storage with the slices of host blocks that hold their bytes, split at block ends."""
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        done = 0
        while done < size:
            index, offset = divmod(start + done, BLOCK_BYTES)
            while index >= len(self._blocks):
                self._blocks.append(host_bytes(BLOCK_BYTES, storage.device))
            length = min(size - done, BLOCK_BYTES - offset)
            yield source[done : done + length], self._blocks[index][offset : offset + length]
            done += length


def _unique_storages(tensors: Iterable[Tensor], device_type: str) -> Iterator[UntypedStorage]:
    """Yield each storage once: tied weights share a storage, and FSDP keeps views of its shards."""
    seen: set[int] = set()
    for tensor in tensors:
        for plain in _plain_tensors(tensor):
            storage = plain.untyped_storage()
            # Memory that PyTorch does not own cannot be resized; an empty storage has no data, or is on the host.
            is_movable = storage.device.type == device_type and storage.nbytes() > 0 and storage.resizable()
            if is_movable and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage


def _plain_tensors(thing: object) -> Iterator[Tensor]:
    """Yield a tensor itself, or its parts: a DTensor's shard, a quantised tensor's codes."""
    if is_traceable_wrapper_subclass(thing):
        for part in inner_tensors(thing).values():
            yield from _plain_tensors(part)
    elif isinstance(thing, Tensor):
        yield thing
