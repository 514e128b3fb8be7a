"""RLModule, which runs the training steps, and its parts."""

from typing import TYPE_CHECKING

from rlightning.lazy import lazy_import

if TYPE_CHECKING:
    from rlightning.module.rl_module import RLModule

__all__ = ["RLModule"]

# Parts of this package do not need torch and transformers.
__getattr__ = lazy_import(__name__, {"RLModule": "rl_module"})
