"""The Ray controller: Lightning's Trainer in a process without a device, and the actor in Ray workers."""

from typing import TYPE_CHECKING

from rlightning.lazy import lazy_import

if TYPE_CHECKING:
    from rlightning.controller.ray_controller import RayController

__all__ = ["RayController"]

# Other modules of this package need neither Lightning nor Ray.
__getattr__ = lazy_import(__name__, {"RayController": "ray_controller"})
