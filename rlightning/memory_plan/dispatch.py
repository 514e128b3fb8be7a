"""What happens to each operation while a model runs on tensors without memory: its bytes are counted."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, from their making until nothing refers to them.

    Args:
        ignored: tensors whose storages are not counted, nor views of them.

    Attributes:
        now: bytes alive.
        peak: the most that were, since :meth:`restart`.
    """

    def __init__(self, ignored: Sequence[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {tensor.untyped_storage()._cdata for tensor in ignored}
        self.now = self.peak = 0

    def restart(self) -> None:
        """Begin to look for a new peak."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


class ExpertProducts(TorchDispatchMode):
    """Within, grouped products of experts run without values in every dtype; torch's do in bfloat16 alone.

    Autocast leaves them in the weights' dtype.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._grouped_mm.default or args[0].dtype == torch.bfloat16:
            return func(*args, **(kwargs or {}))
        left, right, ends = args[0], args[1], args[2] if len(args) > 2 else kwargs["offs"]
        if right.ndim == 3:  # tokens times each expert's weights
            return left.new_empty(left.shape[0], right.shape[2])
        return left.new_empty(ends.shape[0], left.shape[0], right.shape[1])  # the gradient of the weights
