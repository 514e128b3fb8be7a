"""Weights for engines that nothing faster reaches: a safetensors file a chunk, in a folder that all processes share."""

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
from rlightning.processes.liveness import Deadline
from rlightning.rollout.weights.driver import WeightReceiver, WeightSender
from rlightning.rollout.weights.source import ChunkPlan, WeightSource

PREFIX = "weights-"
SYNC = "sync"
"""The key, in a file's metadata, of the number of the sync that it belongs to."""


class FileSender(WeightSender):
    """Writes each chunk to a file, which is there from when :meth:`fill` yields it until the iterator goes on.

    Args:
        plan: of the weights. The bucket is in host memory.
        device: the actor's.
        folder: under this name on all hosts, and this run's alone: what earlier ones have left there is removed.
        timeout: seconds until a worker must find a file that has been written.
        destination: this rank, if the others give their shards by
            :class:`~rlightning.rollout.weights.transports.ShardSender`.
    """

    def __init__(
        self,
        plan: ChunkPlan,
        device: torch.device,
        *,
        folder: Path,
        timeout: float = 60.0,
        destination: int | None = None,
    ) -> None:
        self.plan, self.timeout = plan, timeout
        self._folder = folder.absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        self.destination = destination
        self.bucket = host_bytes(plan.num_bytes, device)
        self._prefix = f"{PREFIX}{uuid.uuid4().hex[:12]}-"
        self._files = [self._folder / f"{self._prefix}{chunk:05d}.safetensors" for chunk in range(len(plan.chunks))]
        self._num_syncs = 0
        self._remove_files(PREFIX)

    def make_receivers(self, devices: Sequence[str]) -> "list[FileReceiver]":
        """See :meth:`WeightSender.make_receivers`."""
        return [FileReceiver(self.plan, self._files, self._num_syncs, self.timeout) for _ in devices]

    def fill(self, source: WeightSource) -> Iterator[int]:
        """See :meth:`WeightSender.fill`."""
        self._num_syncs += 1
        for chunk in super().fill(source):
            try:
                with written_aside(self._files[chunk]) as partial:
                    save_file(dict(self.plan.tensors(self.bucket, chunk)), partial, {SYNC: str(self._num_syncs)})
                yield chunk
            finally:
                remove(self._files[chunk])

    def close(self) -> None:
        """See :meth:`WeightSender.close`."""
        super().close()
        self._remove_files(self._prefix)

    def _remove_files(self, prefix: str) -> None:
        for pattern in (f"{prefix}*.safetensors", f".{prefix}*.safetensors.*"):
            for path in self._folder.glob(pattern):
                remove(path)


class FileReceiver(WeightReceiver):
    """Reads files.

    A disk behind a network may show a file late, or an old one of the same name: each says which sync it belongs to.

    Args:
        plan: of the weights.
        files: of each chunk.
        last_sync: number of the last sync before this receiver is used.
        timeout: seconds that a file may take to be found.
    """

    def __init__(self, plan: ChunkPlan, files: list[Path], last_sync: int, timeout: float) -> None:
        self.plan, self._files, self._sync, self._timeout = plan, files, last_sync, timeout
        self._device = torch.device("cpu")

    def open(self, device: torch.device) -> None:
        """Remember the device that tensors are read to."""
        self._device = device

    def receive(self, chunk: int) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`WeightReceiver.receive`."""
        deadline = Deadline(self._timeout)
        while (tensors := self._read_current(chunk)) is None:
            if deadline.is_over:
                raise EngineError(
                    f"Chunk {chunk} of the weights did not come: {self._files[chunk]} is not there, or of an earlier "
                    f"sync, after {self._timeout:g} s. Trainer and engines must share the folder by the same name."
                )
            time.sleep(intervals.SHORT_POLL_INTERVAL)
        return tensors

    def _read_current(self, chunk: int) -> Iterator[tuple[str, Tensor]] | None:
        """Return the chunk's tensors if its file is of this sync, which begins with the first chunk; else None."""
        try:
            file: Any = safe_open(self._files[chunk], framework="pt", device=str(self._device))
        except OSError:
            return None
        sync = int(file.metadata()[SYNC])
        if sync == self._sync if chunk else sync > self._sync:
            self._sync = sync
            return ((slot.name, file.get_tensor(slot.name)) for slot in self.plan.chunks[chunk])
        return None
