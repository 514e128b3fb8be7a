"""Checks whether the weights of a checkpoint belong to a module."""

from collections.abc import Mapping, Sequence, Set

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlightning.errors import ConfigError
from rlightning.parallel.sharding import local_tensor
from rlightning.protocols import StateDict

Shapes = Mapping[str, Sequence[int] | None]
"""Shapes of saved values by name; None for a value that is not a tensor."""
OF_ACTOR = "actor."
"""Prefix of the names of the actor's weights, which differ between models."""


def check_saved_weights(saved: Mapping[str, object], own: Mapping[str, object], module: nn.Module) -> None:
    """Raise a ConfigError if a checkpoint's weights differ from a module's in their names, shapes or ties.

    The message names the first weight that only one of the two has, that has another shape, or that only one of them
    ties to another weight (by shared memory, or equal values).

    Args:
        saved: the checkpoint's weights, by name.
        own: the module's weights, by name.
        module: the module.
    """
    what, names = "The checkpoint", parameter_names(module)
    check_shapes(shapes_of(saved), shapes_of(own), what)
    ties, own_ties = find_shared(saved, names), find_shared(own, names)
    check_ties(ties, own_ties, what, saved)


def check_shapes(saved: Shapes, own: Shapes, what: str) -> None:
    """Raise a ConfigError for the first weight that is missing in a checkpoint or a module, or has another shape.

    Args:
        saved: the checkpoint's shapes, by name.
        own: the module's shapes, by name.
        what: the checkpoint's name in the error.
    """
    for name, shape in own.items():
        if name not in saved and not name.startswith(OF_ACTOR):
            raise ConfigError(
                f"{what} has no '{name}', which this module has: it was written without it. To start from its "
                "weights alone, export them by SaveHF, and name the folder in model.model."
            )
        held = saved.get(name)
        if shape is not None and (held is None or tuple(held) != tuple(shape)):
            instead = f"one of {tuple(held)}" if held is not None else "nothing of that name"
            raise ConfigError(
                f"{what} is of another model: it should hold '{name}' of {tuple(shape)}, and holds "
                f"{instead}. Name the checkpoint's own model in model.model."
            )
    for name in saved:
        if name not in own:
            raise ConfigError(
                f"{what} holds '{name}', which this module has no place for. Name its own class in "
                "model.class_path, and its own model in model.model."
            )


def check_ties(
    saved: Mapping[str, str], own: Mapping[str, str], what: str, values: Mapping[str, object] | None = None
) -> None:
    """Raise a ConfigError if weights are tied in a checkpoint and not in a module, or the other way around.

    Args:
        saved: the checkpoint's tied weights: for each further name of a weight its first name.
        own: the module's tied weights, in the same form.
        what: the checkpoint's name in the error.
        values: the checkpoint's weights; tied weights that were written separately are found by equal values.
    """
    for name, first in own.items():
        if saved.get(name, name) != saved.get(first, first) and not _is_equal(values or {}, name, first):
            raise ConfigError(
                f"{what} is of another model: '{first}' and '{name}' are two weights there, and one in this module. "
                "Name the checkpoint's own model in model.model."
            )
    for name, first in saved.items():
        if own.get(name, name) != own.get(first, first):
            raise ConfigError(
                f"{what} is of another model: '{first}' and '{name}' are one weight there, and two in this module. "
                "Name the checkpoint's own model in model.model."
            )


def _is_equal(values: Mapping[str, object], name: str, other: str) -> bool:
    one, two = values.get(name), values.get(other)
    return isinstance(one, Tensor) and isinstance(two, Tensor) and torch.equal(one, two)


def check_optimizer_state(saved: StateDict, optimizer: Optimizer) -> None:
    """Raise a ConfigError if a saved optimizer state and an optimizer differ in the sizes of their parameter groups.

    :func:`check_ties` cannot tell whether equal weights in a checkpoint were a single parameter.
    """
    sizes, own_sizes = (
        [len(group["params"]) for group in groups] for groups in (saved["param_groups"], optimizer.param_groups)
    )
    if sizes != own_sizes:
        raise ConfigError(
            f"The checkpoint's optimizer has groups of {sizes} parameters, and this run's has groups of {own_sizes}: "
            "its model tied other weights, or its configure_optimizers was another. To start from its weights alone, "
            "export them by SaveHF, and name the folder in model.model."
        )


def parameter_names(module: nn.Module) -> set[str]:
    """Return the names of a module's parameters, with all names of tied ones and without buffers."""
    return {name for name, _ in module.named_parameters(remove_duplicate=False)}


def find_shared(state: Mapping[str, object], names: Set[str]) -> dict[str, str]:
    """Return the tied weights in a state dict: for each of ``names`` the earlier name with the same memory, if any."""
    firsts: dict[object, str] = {}
    shared: dict[str, str] = {}
    for name, tensor in state.items():
        if name in names and isinstance(tensor, Tensor) and not tensor.is_meta:
            held = local_tensor(tensor)
            memory = held.device, held.dtype, held.untyped_storage().data_ptr(), held.storage_offset()
            if held.numel() and (first := firsts.setdefault((*memory, held.shape, held.stride()), name)) != name:
                shared[name] = first
    return shared


def shapes_of(state: Mapping[str, object]) -> dict[str, Sequence[int] | None]:
    """Return the full shape of each tensor in a state dict, by name; None for other values."""
    return {name: value.shape if isinstance(value, Tensor) else None for name, value in state.items()}
