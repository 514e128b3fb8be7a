"""Task sets, harnesses and environments of the package verifiers, unchanged, in a separate interpreter.

The launcher is imported in that interpreter, where nothing of the trainer is installed.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlightning.environments.verifiers.environment import Verifiers

__all__ = ["Verifiers"]


def __getattr__(name: str) -> object:
    """Import a name of this package that only the trainer's process uses, when it is first accessed."""
    if name == "Verifiers":
        from rlightning.environments.verifiers.environment import Verifiers

        return Verifiers
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
