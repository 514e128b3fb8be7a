"""Checks tensors that overridden methods return: a wrong shape would fail later, or broadcast unnoticed."""

import torch
from torch import Tensor

from rlightning.errors import ConfigError
from rlightning.foreign_text import cut_value


def returned_tensor(values: object, length: int, method: str, unit: str) -> Tensor:
    """Return the values that an overridden method returned as a tensor [length], integers as floats; raise a
    ConfigError for other values. ``method`` and ``unit`` are names for the error.

    Raises:
        ConfigError: the values are not numbers, or there are not ``length`` of them.
    """
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        rule = f"It has to return a tensor of {length} numbers, one for each of the {unit}."
        raise ConfigError(f"{method} returned {cut_value(values)}, a {type(values).__name__}. {rule}") from None
    if tuple(tensor.shape) != (length,):
        raise ConfigError(
            f"{method} returned a tensor of the shape {list(tensor.shape)}, and there are {length} {unit}. It has to "
            f"return one number for each: [{length}]."
        )
    return tensor if tensor.is_floating_point() or tensor.dtype is torch.bool else tensor.float()


def returned_loss(values: object, num_tokens: int, term: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what a loss term returned, [T] losses and [T] metrics by name, after a check; ``term`` is its name for the
    error.

    Raises:
        ConfigError: the result is no such pair, or the losses have another type or shape.
    """
    if not (isinstance(values, tuple) and len(values) == 2 and isinstance(values[1], dict)):
        raise ConfigError(
            f"{term} returned a {type(values).__name__}. It has to return a pair: the losses [T], and a "
            "dictionary of metrics, such as 'return losses, {}'."
        )
    losses, metrics = values
    return returned_tensor(losses, num_tokens, term, "tokens"), metrics
