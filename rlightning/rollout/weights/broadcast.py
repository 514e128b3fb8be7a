"""Weights for engines on other devices or hosts: each chunk is one broadcast, by NCCL, or by gloo on CPUs."""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rlightning.errors import EngineError
from rlightning.rollout.weights.driver import WeightReceiver, WeightSender
from rlightning.rollout.weights.rendezvous import Place, RendezvousServer
from rlightning.rollout.weights.source import ChunkPlan, ChunkViews
from rlightning.rollout.weights.transfer_group import TransferGroup


class BroadcastSender(WeightSender):
    """Broadcasts weights to the engines' workers: to all at the same time, but in turn to workers that share a device.

    Args:
        plan: plan of the weights. Each worker has a bucket of the same size.
        device: device of the bucket: a CUDA device if the engines are on CUDA devices, or the CPU.
        host: address of this machine that the engines can reach. The rendezvous listens only on this address, and
            requires a key that engines get with their receivers. Weights are sent unencrypted: use the address of a
            private network.
        timeout: maximum seconds for connecting, and for sending a chunk.
        destination: this rank, if weights are sharded and the other ranks send their shards by a
            plain :class:`WeightSender`.
    """

    def __init__(
        self,
        plan: ChunkPlan,
        device: torch.device,
        *,
        host: str = "127.0.0.1",
        timeout: float = 60.0,
        destination: int | None = None,
    ) -> None:
        super().__init__(plan, torch.empty(plan.num_bytes, dtype=torch.uint8, device=device), destination=destination)
        self.timeout, self._device, self._host = timeout, device, host
        self._groups: list[TransferGroup] = []

    def make_receivers(self, devices: Sequence[str]) -> "list[BroadcastReceiver]":
        """Return a receiver for each worker. Workers on the same device are in different NCCL groups."""
        self._leave("The trainer connects anew.")
        numbers = number_by_device(devices)
        sizes = dict(sorted(Counter(numbers).items()))
        servers = {number: RendezvousServer(self._host, size + 1, self.timeout) for number, size in sizes.items()}
        self._groups = [TransferGroup(server.places[0], self._device, server) for server in servers.values()]
        places = {number: iter(server.places[1:]) for number, server in servers.items()}
        return [BroadcastReceiver(self.plan, next(places[number])) for number in numbers]

    def connect(self) -> None:
        """Wait until the workers have joined the process groups."""
        try:
            for group in self._groups:
                group.connect()
        except (OSError, RuntimeError) as error:
            self._leave(str(error))
            raise EngineError(f"The engines' workers could not be connected for weights: {error}.") from error

    def send(self, chunk: int) -> None:
        """Broadcast the chunk in the bucket, which may be overwritten after this returns."""
        try:
            for group in self._groups:
                group.broadcast(self.plan.filled(self.bucket, chunk))
        except (OSError, RuntimeError) as error:
            self._leave(str(error))
            raise EngineError(f"The engines' workers did not take chunk {chunk} of the weights: {error}.") from error

    def interrupt(self, reason: str) -> None:
        """Make :meth:`connect` or :meth:`send` fail with ``reason``. Thread-safe."""
        for group in self._groups:
            group.interrupt(reason)

    def close(self) -> None:
        """Leave the process groups, and free the bucket."""
        self._leave("The trainer has closed.")
        super().close()

    def _leave(self, reason: str) -> None:
        for group in self._groups:
            group.leave(reason)


class BroadcastReceiver(WeightReceiver):
    """Receives each broadcast chunk into a bucket that this process has allocated."""

    def __init__(self, plan: ChunkPlan, place: Place) -> None:
        self.plan, self._place = plan, place
        self._group: TransferGroup | None = None

    def open(self, device: torch.device) -> None:
        """Connect to the sender and the other workers."""
        try:
            self._group = TransferGroup(self._place, device)
            self._group.connect()
        except (OSError, RuntimeError) as error:
            raise EngineError(f"No weights from {self._place.host}, port {self._place.port}: {error}.") from error
        self._views = ChunkViews(self.plan, torch.empty(self.plan.num_bytes, dtype=torch.uint8, device=device))

    def receive(self, chunk: int) -> Iterable[tuple[str, Tensor]]:
        """Receive a chunk, and return its names and tensors."""
        assert self._group is not None, "open comes first"
        try:
            self._group.broadcast(self.plan.filled(self._views.bucket, chunk))
        except (OSError, RuntimeError) as error:
            self.close()
            raise EngineError(f"Chunk {chunk} of the weights did not come: {error}.") from error
        return self._views.tensors(chunk)

    def close(self) -> None:
        """Leave the process group."""
        if self._group is not None:
            self._group.leave("The worker has left.")


def number_by_device(devices: Sequence[str]) -> list[int]:
    """Return for each worker the number of earlier workers on its device; devices named "" count as different."""
    return [devices[:number].count(device) if device else 0 for number, device in enumerate(devices)]
