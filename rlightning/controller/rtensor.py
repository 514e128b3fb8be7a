"""RTensor: handles to tensors that stay in the process that computed them.

::

    worker, rank 1                      controller                      another worker
    store_tensors(results)  -- handles -->   passes them on   -- handles --> fetch_tensors(handles)
          |                                                                   ^
          +--------------------- bytes, from node to node --------------------+

The bytes are in the process's :func:`~rlightning.controller.tensor_store.tensor_store`. A stored object is freed when
the last handle to it, in any process, is gone.
"""

import copy
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlightning.controller.tensor_store import Block, Bytes, Owner, stores_results, tensor_store
from rlightning.python_values import field_values
from rlightning.torch_internals import is_traceable_wrapper_subclass

SHARED_BELOW = 1 << 20
"""Tensors with fewer bytes are stored together, as one object for each call."""
T = TypeVar("T")
Change = Callable[[Any], object]
_ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None), np.ndarray})
"""Types that are no tensors and contain none, at which the search for tensors stops."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RTensor:
    """A handle to a stored tensor, which is fetched only on request.

    It is small, and can be an argument or result of Ray's calls; :func:`fetch_tensors` reads it.

    Attributes:
        dtype: dtype of the tensor.
        block: the stored object with the tensor's bytes; small tensors share one.
        index: index of the tensor in the block.
    """

    shape: torch.Size
    dtype: torch.dtype
    block: Block
    index: int

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def owner(self) -> Owner:
        """The process that stored the tensor."""
        return self.block.owner

    def __repr__(self) -> str:
        return f"RTensor({list(self.shape)}, {self.dtype}, stored by {self.owner})"


def store_tensors(tree: object, *, label: str = "") -> Any:
    """Copy the tensors in ``tree`` to this process's store; return ``tree`` with handles in place of the tensors.

    Stored are detached copies on the host; a tensor that occurs twice is stored once, small ones together.

    Args:
        tree: tensors in nested dicts, lists, tuples, NamedTuples and dataclasses. Containers with tensors are copied;
            other values stay the same objects.
        label: name of this call in the error of a full store; by default the caller's function, file and line.

    Returns:
        ``tree`` with an :class:`RTensor` for each tensor; None if another rank of the group stores the same result
        (:func:`~rlightning.controller.tensor_store.stores_results`).

    Raises:
        TypeError: a tensor is a DTensor, sparse, or on the meta device.
        StoreFullError: the store's limit would be exceeded; nothing is stored.
    """
    return _store(tree, label or _call_site()) if stores_results() else None


def store_own_tensors(tree: object, *, label: str = "") -> Any:
    """Do as :func:`store_tensors`, but on every rank of a tensor-parallel group, for tensors that differ between them.

    Before ``on_update_start`` each rank has its own completions; then the ranks of a group have the same batch.
    """
    return _store(tree, label or _call_site())


def _store(tree: object, label: str) -> object:
    tensors = list({id(tensor): tensor for tensor in _leaves(tree, Tensor)}.values())
    for tensor in tensors:
        _check_plain(tensor)
    handles: dict[int, RTensor] = {}
    for group in _group_by_block(tensors):
        block = tensor_store().put([_as_bytes(tensor) for tensor in group], label=label)
        for index, tensor in enumerate(group):
            handles[id(tensor)] = RTensor(tensor.shape, tensor.dtype, block, index)
    return _map_leaves(tree, Tensor, lambda tensor: handles[id(tensor)])


def fetch_tensors(tree: object) -> Any:
    """Return ``tree`` with a CPU copy of its tensor in place of each handle; all are fetched at once.

    Args:
        tree: a result of :func:`store_tensors`, a part of it, or parts of several results.

    Returns:
        ``tree`` with copies of the stored tensors, on the CPU.

    Raises:
        TensorLostError: if a process that stored one of the tensors has ended.
    """
    handles = list({id(handle): handle for handle in _leaves(tree, RTensor)}.values())
    arrays = _read({id(handle.block): handle.block for handle in handles})
    tensors = {id(handle): _as_tensor(arrays[id(handle.block)][handle.index], handle) for handle in handles}
    return _map_leaves(tree, RTensor, lambda handle: tensors[id(handle)])


def _read(blocks: Mapping[int, Block]) -> dict[int, Sequence[Bytes]]:
    """Return the contents of blocks, by the same keys, with one request for all blocks of a type."""
    found: dict[int, Sequence[Bytes]] = {}
    for kind in {type(block) for block in blocks.values()}:
        chosen = {key: block for key, block in blocks.items() if type(block) is kind}
        found |= dict(zip(chosen, kind.read_all(list(chosen.values())), strict=True))
    return found


def _group_by_block(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors by stored object: small tensors share one; large ones have their own, to be freed separately."""
    small = [tensor for tensor in tensors if tensor.nbytes < SHARED_BELOW]
    if small:
        yield small
    yield from ([tensor] for tensor in tensors if tensor.nbytes >= SHARED_BELOW)


def _check_plain(tensor: Tensor) -> None:
    is_plain = tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)
    if not is_plain or tensor.is_quantized or tensor.is_meta:
        raise TypeError(
            f"a {type(tensor).__name__} of layout {tensor.layout} on {tensor.device} cannot be stored: its elements "
            "are not all here. Store a plain tensor instead, such as full_tensor() of a DTensor."
        )


def _as_bytes(tensor: Tensor) -> Bytes:
    """Return the tensor's elements as bytes on the host, copied only if they are elsewhere or not contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    array: Bytes = plain.cpu().reshape(-1).view(torch.uint8).numpy()
    return array


def _as_tensor(array: Bytes, handle: RTensor) -> Tensor:
    """Return a copy as a tensor, since stored memory may be shared, and may be freed while the tensor is in use."""
    flat = torch.empty(handle.nbytes, dtype=torch.uint8)
    np.copyto(flat.numpy(), array)
    return flat.view(handle.dtype).reshape(handle.shape)


def _call_site() -> str:
    """Return the function, file and line of the caller of the function that calls this one."""
    frame = sys._getframe(2)
    return f"{frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def _leaves(tree: object, kind: type[T]) -> list[T]:
    found: list[T] = []

    def note(leaf: T) -> T:
        found.append(leaf)
        return leaf

    _map_leaves(tree, kind, note)
    return found


def _map_leaves(tree: object, kind: type, change: Change) -> object:
    """Return ``tree`` with ``change`` applied to each instance of ``kind``; parts without instances are not copied."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, list | tuple):
        if _ATOMS.issuperset(map(type, tree)):
            return tree
        values = [_map_leaves(value, kind, change) for value in tree]
        if all(new is old for new, old in zip(values, tree, strict=True)):
            return tree
        return tree._make(values) if hasattr(tree, "_make") else type(tree)(values)
    if isinstance(tree, MutableMapping):
        return _map_parts(tree, dict(tree.items()), operator.setitem, kind, change)
    if is_dataclass(tree) and not isinstance(tree, type):
        present = field_values(tree)
        # bypasses the checks of frozen dataclasses, and any __init__ that may need other arguments
        return _map_parts(tree, present, object.__setattr__, kind, change)
    return tree


def _map_parts(
    tree: object,
    parts: Mapping[Any, object],
    set_part: Callable[[Any, Any, object], None],
    kind: type,
    change: Change,
) -> object:
    """Return a copy of ``tree`` with its changed parts set; ``tree`` itself if no part has changed."""
    mapped = {name: _map_leaves(part, kind, change) for name, part in parts.items()}
    changed = [name for name, part in parts.items() if mapped[name] is not part]
    if not changed:
        return tree
    copied = copy.copy(tree)
    for name in changed:
        set_part(copied, name, mapped[name])
    return copied
