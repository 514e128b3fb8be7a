"""The axis of each field of a batch, by which batches are selected, joined, moved, padded and sent.

A field declares the axis of its first dimension, nothing else::

    values: Tensor | None = field(default=None, metadata=axis("T"))

``T`` tokens, ``N`` sequences (branches), ``M`` trajectories, ``G`` groups, in the order of their ids. A field's value
is a tensor, a dictionary of tensors, a list, or None. Fields without an axis are not changed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from rlightning.errors import ConfigError
from rlightning.python_values import field_values

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Dataclass = DataclassInstance | type[DataclassInstance]

Axis = Literal["T", "N", "M", "G"]
Batch = TypeVar("Batch", bound="DataclassInstance")
"""A dataclass whose fields have axes."""
Value: TypeAlias = Tensor | dict[str, Tensor] | list[object] | None
"""Value of a field with an axis."""
Runs = Sequence[tuple[int, int]]
"""Begins and ends of runs of tokens: indices of all tokens would take more memory than the selected values."""
KEY = "axis"


class AxisOf(NamedTuple):
    """Metadata of a batch's field: what its first dimension counts (tokens, sequences, ...), and its padding value.

    Attributes:
        name: axis of the first dimension.
        fill: the field's value in a padding batch.
    """

    name: Axis
    fill: float | bool


def axis(name: Axis, *, fill: float | bool = 0) -> dict[str, AxisOf]:
    """Return the ``metadata`` argument for a dataclass field whose first dimension is the axis ``name``.

    Args:
        name: name of the axis.
        fill: the field's value in a padding batch, which has no effect.
    """
    return {KEY: AxisOf(name, fill)}


def axis_fields(batch: "Dataclass") -> list[tuple["Field[object]", AxisOf]]:
    """Return the fields of a batch, or of its class, that have an axis, with their metadata."""
    return [(f, f.metadata[KEY]) for f in fields(batch) if KEY in f.metadata]


def axis_values(batch: "DataclassInstance") -> list[tuple["Field[object]", AxisOf, Value]]:
    """Return the fields of a batch that have an axis, with their metadata and values."""
    values = field_values(batch)
    return [(f, own, values[f.name]) for f, own in axis_fields(batch)]


def select(batch: Batch, entries: Mapping[Axis, Tensor | Runs]) -> Batch:
    """Return a batch with only the selected tokens, sequences, trajectories or groups, in the given order.

    Args:
        batch: a dataclass with axes.
        entries: for each axis the selected entries in their new order: indices, or runs. Fields of other axes are not
            changed.
    """
    taken: dict[str, object] = {}
    for f, own, value in axis_values(batch):
        if own.name not in entries:
            continue
        chosen = entries[own.name]
        if isinstance(value, list):
            taken[f.name] = [value[int(i)] for i in chosen]  # type: ignore[arg-type]  # lists have no runs
        else:
            taken[f.name] = map_tensors(partial(_take, chosen), value)
    return replace(batch, **taken)


def _take(chosen: Tensor | Runs, values: Tensor) -> Tensor:
    if isinstance(chosen, Tensor):
        return values[chosen]
    return torch.cat([values[:0], *(values[start:end] for start, end in chosen)])


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Join batches along all axes; fields without an axis are taken from the first batch.

    Raises:
        ConfigError: only some of the batches have a field, or an entry of it.
    """
    joined: dict[str, object] = {}
    for of_batches in zip(*map(axis_values, batches), strict=True):
        f, values = of_batches[0][0], [value for *_, value in of_batches]
        joined[f.name] = _join(f.name, values)
    return replace(batches[0], **joined)


def _join(name: str, values: Sequence[Value]) -> Value:
    """Join the values that a field has in several batches."""
    lists = [value for value in values if isinstance(value, list)]
    if lists:
        return [one for value in lists for one in value]
    tables = [value for value in values if isinstance(value, dict)]
    if tables:
        for table in tables:
            for key in sorted(table.keys() ^ tables[0].keys()):
                raise _missing(f"{name}['{key}']")
        return {key: torch.cat([table[key] for table in tables]) for key in tables[0]}
    tensors = [value for value in values if isinstance(value, Tensor)]
    if tensors and len(tensors) < len(values):
        raise _missing(name)
    return torch.cat(tensors) if tensors else None


def to(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with all tensors on a device; copies from host to GPU are asynchronous."""
    tensors = {name: value for name, value in field_values(batch).items() if isinstance(value, Tensor | dict)}
    return replace(batch, **{name: map_tensors(lambda one: move(one, device), v) for name, v in tensors.items()})


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on ``device``; a copy from host to GPU is asynchronous."""
    # only copies from pinned memory are asynchronous
    is_upload = device.type == "cuda" and tensor.device.type == "cpu"
    return (tensor.pin_memory() if is_upload else tensor).to(device, non_blocking=is_upload)


def pad(batch: Batch, one: Batch) -> Batch:
    """Return a one-entry batch with the fields that it lacks and another batch has, filled with padding.

    Args:
        batch: a batch with the fields, which have the shapes and dtypes to use.
        one: the batch to which the fields are added.
    """
    filled: dict[str, object] = {}
    for (f, own, value), (_, _, mine) in zip(axis_values(batch), axis_values(one), strict=True):
        if mine is None or (isinstance(mine, dict) and not mine):
            filled[f.name] = map_tensors(partial(_fill, own.fill), value)
    return replace(one, **filled)


def _fill(fill: float | bool, values: Tensor) -> Tensor:
    return values.new_full((1, *values.shape[1:]), fill)


def check(batch: "DataclassInstance", sizes: Mapping[Axis, int], unit: Mapping[Axis, str]) -> None:
    """Convert a batch's fields to tensors, in place; raise a ConfigError for a field of a wrong length.

    Args:
        batch: the batch, which is changed in place.
        sizes: length of each axis.
        unit: names of the axes' entries, for the error.
    """
    for f, own, value in axis_values(batch):
        if value is None or (isinstance(value, list) and f.default is not None):  # the latter is one of objects
            continue
        size, of = sizes[own.name], unit[own.name]
        if isinstance(value, dict):
            for name, part in value.items():
                value[name] = _to_tensor(part, f"batch.{f.name}['{name}']", size, of)
        else:
            setattr(batch, f.name, _to_tensor(value, f"batch.{f.name}", size, of))


def _to_tensor(value: object, place: str, size: int, unit: str) -> Tensor:
    """Return a field's value as a tensor; raises a ConfigError if it does not have ``size`` entries."""
    tensor = torch.as_tensor(value)
    if tensor.ndim == 0 or len(tensor) != size:
        raise ConfigError(
            f"{place} has the shape {list(tensor.shape)}, and the batch has {size} {unit}. Its first dimension must be "
            "theirs: an entry for each."
        )
    return tensor


def split_lists(batch: Batch) -> tuple[Batch, dict[str, list[object]]]:
    """Return the batch without its lists, and the lists by field name: tensors and objects are sent separately."""
    lists = {f.name: value for f, _, value in axis_values(batch) if isinstance(value, list)}
    return replace(batch, **{name: [] for name in lists}), lists


def map_tensors(change: Callable[[Tensor], Tensor], value: Value) -> Value:
    """Apply ``change`` to a field's tensor or tensors; a list and None are returned unchanged."""
    if isinstance(value, dict):
        return {name: change(part) for name, part in value.items()}
    return change(value) if isinstance(value, Tensor) else value


def _missing(place: str) -> ConfigError:
    return ConfigError(
        f"batch.{place} is set on some of the batches that make a step, and not on others. Set it on each, in refills "
        "and on all ranks."
    )
