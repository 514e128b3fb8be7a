"""The Ray controller: Lightning's Trainer in a process without a device, and the actor in Ray workers."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlightning.controller.ray_controller import RayController

__all__ = ["RayController"]


def __getattr__(name: str) -> object:
    """Import RayController on first access: other modules of this package need neither Lightning nor Ray."""
    if name == "RayController":
        from rlightning.controller.ray_controller import RayController

        return RayController
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
