"""RLModule, which runs the training steps, and its parts."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlightning.module.rl_module import RLModule

__all__ = ["RLModule"]


def __getattr__(name: str) -> object:
    """Import RLModule on first access, since parts of this package do not need torch and transformers."""
    if name == "RLModule":
        from rlightning.module.rl_module import RLModule

        return RLModule
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
