"""RL post-training for language models, the Lightning way."""

from pkgutil import resolve_name
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlightning.module import RLModule
    from rlightning.trainer import Trainer

__all__ = ["RLModule", "Trainer"]

_FILES = {"RLModule": "module", "Trainer": "trainer"}


def __getattr__(name: str) -> object:
    """Import a class on first access, so that the command's ``--help`` does not import torch."""
    if name in _FILES:
        return resolve_name(f"{__name__}.{_FILES[name]}:{name}")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
