"""Weights for engines that no faster transport reaches: one safetensors file for each chunk, in a shared folder."""

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
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
"""The key of a sync's number in a file's metadata."""


class FileSender(WeightSender):
    """Writes each chunk to a file, which exists from when :meth:`fill` yields it until the next chunk is requested.

    Args:
        plan: plan of the weights. The bucket is in host memory.
        device: the actor's device.
        folder: folder with the same path on all hosts, used only by this run; files of earlier runs are removed.
        timeout: maximum seconds until a worker finds a written file.
        destination: this rank, if the others send their shards by a plain :class:`WeightSender`.
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
        super().__init__(plan, host_bytes(plan.num_bytes, device), destination=destination)
        self.timeout = timeout
        self._folder = folder.absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._prefix = f"{PREFIX}{uuid.uuid4().hex[:12]}-"
        self._files = [self._folder / f"{self._prefix}{chunk:05d}.safetensors" for chunk in range(len(plan.chunks))]
        self._num_syncs = 0
        self._remove_files(PREFIX)

    def make_receivers(self, devices: Sequence[str]) -> "list[FileReceiver]":
        """Return a receiver for each worker, all with the same files."""
        return [FileReceiver(self.plan, self._files, self._num_syncs, self.timeout) for _ in devices]

    def fill(self, source: WeightSource) -> Iterator[int]:
        """Fill the bucket with each chunk, write its file, and yield its index."""
        self._num_syncs += 1
        for chunk in super().fill(source):
            try:
                with written_aside(self._files[chunk]) as partial:
                    save_file(dict(self.plan.tensors(self.bucket, chunk)), partial, {SYNC: str(self._num_syncs)})
                yield chunk
            finally:
                remove(self._files[chunk])

    def close(self) -> None:
        """Remove the files, and free the bucket."""
        super().close()
        self._remove_files(self._prefix)

    def _remove_files(self, prefix: str) -> None:
        for pattern in (f"{prefix}*.safetensors", f".{prefix}*.safetensors.*"):
            for path in self._folder.glob(pattern):
                remove(path)


class FileReceiver(WeightReceiver):
    """Reads each chunk of weights from the file that a :class:`FileSender` has written.

    A network file system may show a file late, or an old file of the same name. Hence each file contains the number of
    its sync.

    Args:
        plan: plan of the weights.
        files: path of each chunk's file.
        last_sync: number of the last sync before this receiver is used.
        timeout: maximum seconds until a file is found.
    """

    def __init__(self, plan: ChunkPlan, files: list[Path], last_sync: int, timeout: float) -> None:
        self.plan, self._files, self._sync, self._timeout = plan, files, last_sync, timeout
        self._device = torch.device("cpu")

    def open(self, device: torch.device) -> None:
        """Set the device to which tensors are read."""
        self._device = device

    def receive(self, chunk: int) -> Iterable[tuple[str, Tensor]]:
        """Wait for a chunk's file, and return its names and tensors, each read when it is asked for."""
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
        """Return the chunk's tensors if its file belongs to the current sync, which chunk 0 sets; else None."""
        try:
            file: Any = safe_open(self._files[chunk], framework="pt", device=str(self._device))
        except OSError:
            return None
        sync = int(file.metadata()[SYNC])
        if sync == self._sync if chunk else sync > self._sync:
            self._sync = sync
            return ((slot.name, file.get_tensor(slot.name)) for slot in self.plan.chunks[chunk])
        return None
