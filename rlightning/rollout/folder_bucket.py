"""Weights for engines that nothing faster reaches: a safetensors file a chunk, in a folder that all see."""

import pickle
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlightning import intervals
from rlightning.atomic_save import remove, written_aside
from rlightning.errors import EngineError
from rlightning.parallel.device import host_bytes
from rlightning.rollout.weights import Shapes, Slot, Weights, gather_chunks, plan_chunks

PREFIX = "weights-"
SYNC = "sync"
"""The key, in a file's metadata, of the number of the sync that it belongs to."""


class FolderBucket:
    """The trainer's end (a :class:`~rlightning.rollout.weights.SendingEnd`), on the rank that owns the engines.

    A chunk's file is there from when :meth:`fill` yields it until the iterator goes on.

    Args:
        shapes: see :data:`~rlightning.rollout.weights.Shapes`.
        dtype: the engines'.
        device: the actor's.
        bucket_bytes: see :func:`~rlightning.rollout.weights.plan_chunks`. In host memory, and on the disk.
        folder: under this name on all hosts, and this run's alone: what earlier ones have left there is removed.
        timeout: seconds until a worker must see a file that has been written.
        destination: this rank, if weights are sharded and the other ranks, which have no bucket, give their shards by
            :class:`~rlightning.rollout.weights.ShardGiver`.
    """

    def __init__(
        self,
        shapes: Shapes,
        dtype: torch.dtype,
        device: torch.device,
        bucket_bytes: int,
        *,
        folder: Path,
        timeout: float = 60.0,
        destination: int | None = None,
    ) -> None:
        self.dtype = dtype
        self.folder = folder.absolute()
        self.timeout = timeout
        self.destination = destination
        self.chunks, num_bytes = plan_chunks(shapes, dtype, bucket_bytes)
        self._bytes = host_bytes(num_bytes, device)
        self._prefix = f"{PREFIX}{uuid.uuid4().hex[:12]}-"
        self._num_syncs = 0
        self._remove_files(PREFIX)

    def handles(self, groups: Sequence[int]) -> list[bytes]:
        """See :meth:`~rlightning.rollout.weights.SendingEnd.handles`."""
        files = [str(self._file(index)) for index in range(len(self.chunks))]
        handle = pickle.dumps((FolderEnd, self.chunks, files, self._num_syncs, self.timeout))
        return [handle] * len(groups)

    def connect(self) -> None:
        """The workers open files when they load them."""

    def fill(self, weights: Weights) -> Iterator[int]:
        """See :meth:`~rlightning.rollout.weights.SendingEnd.fill`."""
        self._num_syncs += 1
        for index in gather_chunks(
            self.chunks,
            lambda slot: slot.view(self._bytes, self.dtype),
            weights,
            device=torch.device("cpu"),
            destination=self.destination,
        ):
            tensors = {slot.name: slot.view(self._bytes, self.dtype) for slot in self.chunks[index]}
            try:
                with written_aside(self._file(index)) as partial:
                    save_file(tensors, partial, metadata={SYNC: str(self._num_syncs)})
                yield index
            finally:
                remove(self._file(index))

    def send(self, index: int) -> None:
        """The workers see the file."""

    def interrupt(self, reason: str) -> None:
        """Nothing waits here."""

    def close(self) -> None:
        """See :meth:`~rlightning.rollout.weights.SendingEnd.close`."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._remove_files(self._prefix)

    def _file(self, index: int) -> Path:
        return self.folder / f"{self._prefix}{index:05d}.safetensors"

    def _remove_files(self, prefix: str) -> None:
        for pattern in (f"{prefix}*.safetensors", f".{prefix}*.safetensors.*"):
            for path in self.folder.glob(pattern):
                remove(path)


class FolderEnd:
    """The :class:`~rlightning.rollout.weights.ReceivingEnd` of a :class:`FolderBucket`.

    A disk behind a network may show a file late, or an old one of the same name: each says which sync it belongs to.

    Args:
        device: the worker's.
        chunks: as the sender's.
        files: the name of each chunk's.
        last_sync: number of the last one before.
        timeout: seconds.
    """

    def __init__(
        self, device: torch.device, chunks: list[list[Slot]], files: list[str], last_sync: int, timeout: float
    ) -> None:
        self.device, self.chunks, self.files, self.timeout = device, chunks, files, timeout
        self._sync = last_sync

    @property
    def num_chunks(self) -> int:
        """See :class:`~rlightning.rollout.weights.ReceivingEnd`."""
        return len(self.chunks)

    def receive(self, index: int) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`~rlightning.rollout.weights.ReceivingEnd.receive`."""
        end = time.monotonic() + self.timeout
        while (file := self._open_fresh(index)) is None:
            if time.monotonic() > end:
                raise EngineError(
                    f"Chunk {index} of the weights did not come: {self.files[index]} is not there, or of an earlier "
                    f"sync, after {self.timeout:g} s. Trainer and engines must see the same folder by the same name."
                )
            time.sleep(intervals.SHORT_POLL_INTERVAL)
        return ((slot.name, file.get_tensor(slot.name)) for slot in self.chunks[index])

    def _open_fresh(self, index: int) -> Any:
        """The chunk's file if it is of this sync; the first chunk begins one."""
        try:
            file = safe_open(self.files[index], framework="pt", device=str(self.device))
        except OSError:
            return None
        sync = int(file.metadata()[SYNC])  # type: ignore[no-untyped-call]
        if sync == self._sync if index else sync > self._sync:
            self._sync = sync
            return file
        return None

    def close(self) -> None:
        """See :meth:`~rlightning.rollout.weights.ReceivingEnd.close`."""
