"""Task sets, harnesses and environments of the package verifiers, unchanged, in an interpreter of their own.

The launcher is imported in that interpreter, where nothing of the trainer is installed.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlightning.environments.verifiers.environment import Verifiers

__all__ = ["Verifiers"]


def __getattr__(name: str) -> object:
    """Import what the trainer's process alone uses when it is asked for."""
    if name == "Verifiers":
        from rlightning.environments.verifiers.environment import Verifiers

        return Verifiers
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
