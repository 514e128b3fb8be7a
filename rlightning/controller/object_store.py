"""Stores tensors in Ray's object store: in shared memory of their node, with references counted over all processes."""

import pickle
from collections.abc import Callable, Sequence
from typing import Self

import ray

from rlightning.controller.ray_internals import call_when_unreferenced, is_pickled_for_call
from rlightning.controller.tensor_store import Block, Bytes, Owner, TensorLostError, TensorStore
from rlightning.errors import ConfigError


class RayBlock(Block):
    """Reference to tensors' bytes in Ray's object store, which counts references and copies the bytes between nodes."""

    def __init__(self, ref: "ray.ObjectRef[list[Bytes]]", owner: Owner, label: str) -> None:
        super().__init__(owner, label)
        self._ref = ref

    @classmethod
    def read_all(cls, blocks: Sequence[Self]) -> list[Sequence[Bytes]]:
        """Return the bytes of each block's tensors, read-only in this node's shared memory; waits for their transfer.

        Raises:
            TensorLostError: a process that stored one of the blocks has ended.
        """
        try:
            found: list[Sequence[Bytes]] = ray.get([block._ref for block in blocks])
        except ray.exceptions.ObjectLostError as error:
            lost = next((block for block in blocks if block._ref.hex() == error.object_ref_hex), blocks[0])
            raise TensorLostError(
                f"What '{lost.label}' stored is gone: {lost.owner} has ended ({type(error).__name__}). "
                "Fetch results while their worker lives."
            ) from error
        return found

    def __reduce__(self) -> tuple[object, ...]:
        if not is_pickled_for_call():
            # Ray could not count this copy: it would be dangling, or would keep the tensor forever.
            raise pickle.PicklingError(
                f"A handle to what '{self.label}' stored can only be sent in an argument or a result of a Ray call, "
                "where it is counted. Send it there, or fetch it first."
            )
        return RayBlock, (self._ref, self.owner, self.label)


class RayStore(TensorStore):
    """Stores tensors in Ray's object store. Needs ``pip install 'rlightning[ray]'`` and a connection to Ray.

    The tensors that a process has stored are lost when it ends.

    Args:
        max_bytes: maximum bytes of this process's stored tensors at a time; None for only Ray's own limit, which
            applies to all processes of a node together.
    """

    full_timeout = 10.0  # seconds; other processes release handles by a message that takes milliseconds

    def __init__(self, *, max_bytes: int | None = None) -> None:
        super().__init__(max_bytes=max_bytes)
        if not ray.is_initialized():
            raise ConfigError(
                "RayStore stores where this process has joined Ray, and it has not. Call ray.init() first."
            )

    def _store(self, arrays: Sequence[Bytes], owner: Owner, label: str, forget: Callable[[], object]) -> Block:
        ref = ray.put(list(arrays))
        call_when_unreferenced(ref, forget)
        return RayBlock(ref, owner, label)
