"""RLModule: one training step, and what it is made of."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlightning.module.rl_module import RLModule

__all__ = ["RLModule"]


def __getattr__(name: str) -> object:
    """Import RLModule when it is asked for: parts of this package do without torch and transformers."""
    if name == "RLModule":
        from rlightning.module.rl_module import RLModule

        return RLModule
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
