"""Records what vLLM writes when it installs an adapter, in order to write the values of later versions in the same way.

vLLM installs each weight by several calls: it scales ``B`` in place, fills a layer's memory with zeros, and copies the
worker's part of ``A`` and ``B`` into it. The memory that it reads and writes does not depend on the values. Repeating
all writes of an adapter takes three calls, where installing the 504 weights of an 8B model takes 11 to 19 ms of Python
on the host of an H200.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rlightning.torch_internals import TorchDispatchMode, copy_tensors, is_write, scale_tensors, zero_tensors

aten = torch.ops.aten


class RecordedWrites(TorchDispatchMode):
    """Context manager that records which tensors are filled with zeros, scaled, and copied to from source tensors.

    Args:
        sources: the tensors whose values are installed, each in memory of its own.
    """

    def __init__(self, sources: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources = {_address(tensor) for tensor in sources}
        self._read, self._multiplied, self._written = set[int](), set[int](), set[int]()
        self._zeroed: list[Tensor] = []
        self._scaled: list[Tensor] = []
        self._factors: list[float] = []
        self._targets: list[Tensor] = []
        self._copied: list[Tensor] = []
        self._unknown: list[str] = []

    @property
    def reason_not_repeatable(self) -> str | None:
        """Why :meth:`repeat` would not do all that was recorded; None if it would."""
        if self._unknown:
            return f"{self._unknown[0]} cannot be repeated"
        num_unread = len(self._sources - self._read)
        return f"weights that were not read: {num_unread}" if num_unread else None

    @property
    def is_repeatable(self) -> bool:
        """Whether :meth:`repeat` does all that was recorded."""
        return self.reason_not_repeatable is None

    def repeat(self) -> None:
        """Fill with zeros, scale and copy what was recorded, with the sources' current values."""
        assert self.is_repeatable, "something was recorded that cannot be repeated"
        zero_tensors(self._zeroed)
        scale_tensors(self._scaled, self._factors)
        copy_tensors(self._targets, self._copied)

    # Typed as in torch.
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator, and record it if it writes."""
        if is_write(func) and not self._record(func.overloadpacket, *args):
            self._unknown.append(str(func))
        return func(*args, **(kwargs or {}))

    def _record(self, operator: object, target: object, value: object = 0, *_: object) -> bool:
        """Record a write into ``target``; return whether it can be repeated in the order zeros, scaling, copies.

        Each of the three is one call, which on a GPU writes in any order: nothing may be scaled or copied to twice.
        """
        if not isinstance(target, Tensor):
            return False
        place = _address(target)
        if place in self._sources:  # scaled in place
            if operator is not aten.mul_ or not isinstance(value, int | float):
                return False
            is_first = place not in self._read and place not in self._multiplied
            self._scaled.append(target)
            self._factors.append(value)
            self._multiplied.add(place)
            return is_first
        if operator is aten.copy_ and isinstance(value, Tensor) and _address(value) in self._sources:
            is_first = place not in self._written
            self._targets.append(target)
            self._copied.append(value)
            self._read.add(_address(value))
            self._written.add(place)
            return is_first
        if operator in (aten.zero_, aten.fill_) and not value:  # a number, or a tensor of one on the CPU
            self._zeroed.append(target)
            return place not in self._written
        return False


def _address(tensor: Tensor) -> int:
    """Return the address of the memory of which a tensor is a view."""
    return tensor.untyped_storage().data_ptr()
