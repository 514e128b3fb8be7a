"""Whether a model that was loaded has taken each weight, and has no parameter left that none of them has set."""

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class ReadWeights(TorchFunctionMode):
    """Within, records which of the tensors that pass :meth:`watch` any operation of torch takes.

    A loader passes over a name that its model lacks without a word, and does nothing with the tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self._addresses: dict[str, range] = {}
        self._read: set[int] = set()
        self._is_recording = True

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights, which are contiguous, and remember where they lie."""
        self._is_recording = False  # what makes the tensors is none of the loader's operations
        for name, weight in weights:
            self._addresses[name] = range(weight.data_ptr(), weight.data_ptr() + weight.nbytes)
            self._is_recording = True
            yield name, weight
            self._is_recording = False
        self._is_recording = True

    def unread(self) -> set[str]:
        """The names of the weights that none has taken."""
        read = [*sorted(self._read), sys.maxsize]
        return {
            name
            for name, addresses in self._addresses.items()
            if addresses and read[bisect_left(read, addresses.start)] not in addresses
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record the tensors that ``func`` takes; to ask for a property such as a shape is not to read."""
        kwargs = kwargs or {}
        if self._is_recording and getattr(func, "__name__", "") != "__get__":
            self._read |= {tensor.data_ptr() for tensor in _tensors((args, kwargs.values())) if tensor.numel()}
        return func(*args, **kwargs)


def unset_parameters(model: nn.Module, loaded: set[str]) -> set[str]:
    """Return the parameters that loading has left as they were.

    Args:
        model: vLLM's.
        loaded: names that its loader reports; of a shared parameter any one.
    """
    parameters = list(model.named_parameters(remove_duplicate=False))
    done = {id(parameter) for name, parameter in parameters if name in loaded}
    return {name for name, parameter in parameters if id(parameter) not in done}


def describe_faults(reports: Sequence[tuple[Sequence[str], Sequence[str]]]) -> list[str]:
    """Return what is wrong with a model after all weights were sent, in a sentence each; nothing if all is well.

    Args:
        reports: of each worker, the parameters that none has set, and the weights that it has not taken. Workers that
            split a model may each take a part of the weights.
    """
    unset = sorted(set(chain.from_iterable(unset for unset, _ in reports)))
    unread = sorted(set.intersection(*(set(unread) for _, unread in reports)))
    faults = []
    if unset:
        faults.append(
            f"{len(unset)} of the engine's parameters were set by none of the weights that the actor sent and are "
            f"still random, such as {', '.join(unset[:3])}. vLLM's model has them, the actor's files would not."
        )
    if unread:
        faults.append(
            f"{len(unread)} of the weights that the actor sent were not taken, such as {', '.join(unread[:3])}: vLLM's "
            "model of this architecture has no place for them, and would compute without. Choose another model."
        )
    return faults


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments, also those in lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)) or type(value) is type({}.values()):
            yield from _tensors(value)
