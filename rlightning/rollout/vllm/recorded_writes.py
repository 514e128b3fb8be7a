"""Records what vLLM writes when it installs an adapter, in order to write the values of later versions in the same way.

vLLM installs each weight by several calls: it scales ``B`` in place, fills a layer's memory with zeros, and copies the
worker's part of ``A`` and ``B`` into it. The memory that it reads and writes does not depend on the values. Repeating all
writes of an adapter takes three calls, where installing 504 weights takes 11 to 19 ms of Python.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlightning.torch_internals import TorchDispatchMode, copy_tensors, is_write, scale_tensors, zero_tensors

aten = torch.ops.aten


class RecordedWrites(TorchDispatchMode):
    """Context manager that records which tensors are filled with zeros, scaled, and copied to from source tensors.

    Args:
        sources: the tensors whose values are installed, each in memory of its own.

    Attributes:
        is_repeatable: whether :meth:`repeat` does all that was recorded: each source has been read, and nothing was
            written in another way or another order.
    """

    def __init__(self, sources: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources = {_address(tensor) for tensor in sources}
        self._read, self._written = set[int](), set[int]()
        self._zeroed: list[Tensor] = []
        self._scaled: list[tuple[Tensor, float]] = []
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._is_known = True

    @property
    def is_repeatable(self) -> bool:  # noqa: D102  # an attribute
        return self._is_known and self._read == self._sources

    def repeat(self) -> None:
        """Fill with zeros, scale and copy what was recorded, with the sources' current values."""
        assert self.is_repeatable, "something was recorded that cannot be repeated"
        zero_tensors(self._zeroed)
        scale_tensors([tensor for tensor, _ in self._scaled], [factor for _, factor in self._scaled])
        copy_tensors([target for target, _ in self._copies], [source for _, source in self._copies])

    # Typed as in torch.
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator, and record it if it writes."""
        if is_write(func):
            self._is_known &= self._record(func.overloadpacket, *args)
        return func(*args, **(kwargs or {}))

    def _record(self, operator: object, target: object, value: object = 0, *_: object) -> bool:
        """Record a write into ``target``; return whether it can be repeated in the order zeros, scaling, copies."""
        if not isinstance(target, Tensor):
            return False
        place = _address(target)
        if place in self._sources:  # scaled in place
            if operator is not aten.mul_ or not isinstance(value, int | float):
                return False
            self._scaled.append((target, value))
            return place not in self._read
        if operator is aten.copy_ and isinstance(value, Tensor) and _address(value) in self._sources:
            self._copies.append((target, value))
            self._read.add(_address(value))
            self._written.add(place)
            return True
        if operator in (aten.zero_, aten.fill_, aten.copy_) and _is_zero(value):
            self._zeroed.append(target)
            return place not in self._written
        return False


def _address(tensor: Tensor) -> int:
    """Return the address of the memory of which a tensor is a view."""
    return tensor.untyped_storage().data_ptr()


def _is_zero(value: object) -> bool:
    """Return whether a value is the number 0, or a tensor of one 0, which may be expanded."""
    if isinstance(value, Tensor):
        return value.untyped_storage().nbytes() == value.itemsize and not value.any()
    return value == 0
