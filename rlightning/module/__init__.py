"""RLModule, the module that takes the training steps, and the parts that it is built from."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlightning.module.rl_module import RLModule

__all__ = ["RLModule"]


def __getattr__(name: str) -> object:
    """Import RLModule on first access, because parts of this package do not need torch and transformers."""
    if name == "RLModule":
        from rlightning.module.rl_module import RLModule

        return RLModule
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
