"""Several processes: strategies, barriers, and what ranks tell each other.

``trainer.strategy`` can name ``rlightning.distributed.FSDP``, ``rlightning.distributed.DDP`` or
``rlightning.distributed.RayController``, which are imported when they are asked for: other parts of this folder do
without Lightning and transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlightning.distributed.ddp import DDP
    from rlightning.distributed.fsdp import FSDP
    from rlightning.distributed.ray_controller import RayController

__all__ = ["DDP", "FSDP", "RayController"]

_FILES = {"DDP": "ddp", "FSDP": "fsdp", "RayController": "ray_controller"}


def __getattr__(name: str) -> Any:
    if name in _FILES:
        return getattr(import_module(f"{__name__}.{_FILES[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
