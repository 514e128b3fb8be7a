"""Checks that the weights of a checkpoint fit a module."""

from collections.abc import Mapping

from torch import Tensor

from rlightning.errors import ConfigError
from rlightning.module.roles import ACTOR


def check_saved_weights(saved: Mapping[str, object], own: Mapping[str, object]) -> None:
    """Refuse a checkpoint whose weights differ from the module's in name or shape; the error names the first."""
    for name, tensor in own.items():
        if name not in saved and not name.startswith(f"{ACTOR}."):
            raise ConfigError(
                f"The checkpoint has no '{name}', which this module has: it was written without it. To start from its "
                "weights alone, export them by SaveHF, and name the folder in model.model."
            )
        held = saved.get(name)
        if isinstance(tensor, Tensor) and (not isinstance(held, Tensor) or held.shape != tensor.shape):
            instead = f"one of {tuple(held.shape)}" if isinstance(held, Tensor) else "nothing of that name"
            raise ConfigError(
                f"The checkpoint is of another model: it should hold '{name}' of {tuple(tensor.shape)}, and holds "
                f"{instead}. Name the checkpoint's own model in model.model."
            )
    for name in saved:
        if name not in own:
            raise ConfigError(
                f"The checkpoint holds '{name}', which this module has no place for. Name its own class in "
                "model.class_path, and its own model in model.model."
            )
