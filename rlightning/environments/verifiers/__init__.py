"""Task sets, harnesses and environments of the package verifiers, unchanged, in a separate interpreter.

The launcher is imported in that interpreter, where nothing of the trainer is installed.
"""

from typing import TYPE_CHECKING

from rlightning.lazy import lazy_import

if TYPE_CHECKING:
    from rlightning.environments.verifiers.environment import Verifiers

__all__ = ["Verifiers"]

__getattr__ = lazy_import(__name__, {"Verifiers": "environment"})
