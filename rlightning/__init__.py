"""RL post-training for language models, the Lightning way."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlightning.trainer import Trainer

__all__ = ["Trainer"]


def __getattr__(name: str) -> Any:
    """Import the Trainer when it is asked for: the command's ``--help`` needs no torch."""
    if name == "Trainer":
        from rlightning.trainer import Trainer

        return Trainer
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
