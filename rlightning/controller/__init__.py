"""The Ray controller: Lightning's Trainer in a process without a device, the actor in workers of Ray's."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlightning.controller.ray_controller import RayController

__all__ = ["RayController"]


def __getattr__(name: str) -> object:
    """Import RayController when it is asked for: other parts of this package do without Lightning and Ray."""
    if name == "RayController":
        from rlightning.controller.ray_controller import RayController

        return RayController
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
