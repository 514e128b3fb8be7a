"""Weights for engines on other devices or hosts: each chunk is one broadcast, by NCCL or on the CPU by gloo."""

import pickle
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rlightning.errors import EngineError
from rlightning.rollout.transfer_group import Place, TransferReceiver, TransferSender
from rlightning.rollout.weights import Shapes, Slot, Weights, gather_chunks, plan_chunks


class BroadcastBucket:
    """The trainer's end (a :class:`~rlightning.rollout.weights.SendingEnd`), on the rank that owns the engines.

    After a failure, new :meth:`handles` can be given to the engines that are left.

    Args:
        shapes: see :data:`~rlightning.rollout.weights.Shapes`.
        dtype: the engines'.
        device: where the bucket lies: a CUDA device if the engines are on others, or the CPU if they are on CPUs.
        bucket_bytes: see :func:`~rlightning.rollout.weights.plan_chunks`. Each worker has a bucket of this size, too.
        host: this machine's address as the engines reach it. The port where they meet is open on that address alone,
            and to those who know the secret that goes to the engines with the order. What is sent is not encrypted: use
            the address of a private network.
        timeout: seconds that connecting may take, and that sending a chunk may take.
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
        host: str = "127.0.0.1",
        timeout: float = 60.0,
        destination: int | None = None,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.host = host
        self.timeout = timeout
        self.destination = destination
        self.chunks, num_bytes = plan_chunks(shapes, dtype, bucket_bytes)
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._senders: list[TransferSender] = []

    def handles(self, groups: Sequence[int]) -> list[bytes]:
        """See :meth:`~rlightning.rollout.weights.SendingEnd.handles`. NCCL knows each device once in a group."""
        self._leave("The trainer connects anew.")
        sizes = dict(sorted(Counter(groups).items()))
        self._senders = [
            TransferSender(size, self.device, host=self.host, timeout=self.timeout) for size in sizes.values()
        ]
        places = {group: iter(sender.places) for group, sender in zip(sizes, self._senders, strict=True)}
        contents = (self.chunks, self.dtype, self._bytes.numel())
        return [pickle.dumps((BroadcastEnd, *contents, next(places[group]))) for group in groups]

    def connect(self) -> None:
        """See :meth:`~rlightning.rollout.weights.SendingEnd.connect`."""
        try:
            for sender in self._senders:
                sender.connect()
        except (OSError, RuntimeError) as error:
            self._tell(str(error))
            raise EngineError(f"The engines' workers could not be connected for weights: {error}.") from error

    def fill(self, weights: Weights) -> Iterator[int]:
        """See :meth:`~rlightning.rollout.weights.SendingEnd.fill`."""
        yield from gather_chunks(
            self.chunks,
            lambda slot: slot.view(self._bytes, self.dtype),
            weights,
            device=self.device,
            destination=self.destination,
        )

    def send(self, index: int) -> None:
        """See :meth:`~rlightning.rollout.weights.SendingEnd.send`. The bucket is free when this returns."""
        try:
            for sender in self._senders:
                sender.broadcast(_used(self._bytes, self.chunks[index], self.dtype))
        except (OSError, RuntimeError) as error:
            self._tell(str(error))
            raise EngineError(f"The engines' workers did not take chunk {index} of the weights: {error}.") from error

    def interrupt(self, reason: str) -> None:
        """See :meth:`~rlightning.rollout.weights.SendingEnd.interrupt`."""
        for sender in self._senders:
            sender.interrupt(reason)

    def close(self) -> None:
        """See :meth:`~rlightning.rollout.weights.SendingEnd.close`."""
        self._leave("The trainer has closed.")
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def _leave(self, reason: str) -> None:
        self._tell(reason)
        self._senders = []

    def _tell(self, reason: str) -> None:
        for sender in self._senders:
            sender.leave(reason)


class BroadcastEnd:
    """The :class:`~rlightning.rollout.weights.ReceivingEnd` of a :class:`BroadcastBucket`.

    Args:
        device: the worker's.
        chunks, dtype, num_bytes: of the sender's bucket.
        place: among the workers.
    """

    def __init__(
        self, device: torch.device, chunks: list[list[Slot]], dtype: torch.dtype, num_bytes: int, place: Place
    ) -> None:
        self.chunks, self.dtype = chunks, dtype
        try:
            self._receiver = TransferReceiver(place, device)
        except (OSError, RuntimeError) as error:
            raise EngineError(f"No weights from {place.host}, port {place.port}: {error}.") from error
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    @property
    def num_chunks(self) -> int:
        """See :class:`~rlightning.rollout.weights.ReceivingEnd`."""
        return len(self.chunks)

    def receive(self, index: int) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`~rlightning.rollout.weights.ReceivingEnd.receive`."""
        try:
            self._receiver.broadcast(_used(self._bytes, self.chunks[index], self.dtype))
        except (OSError, RuntimeError) as error:
            self.close()
            raise EngineError(f"Chunk {index} of the weights did not come: {error}.") from error
        return ((slot.name, slot.view(self._bytes, self.dtype)) for slot in self.chunks[index])

    def close(self) -> None:
        """See :meth:`~rlightning.rollout.weights.ReceivingEnd.close`."""
        self._receiver.leave()


def _used(bucket: Tensor, chunk: list[Slot], dtype: torch.dtype) -> Tensor:
    """The part of the bucket that the chunk fills."""
    return bucket[: chunk[-1].end(dtype)]
