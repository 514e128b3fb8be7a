"""Runs of several processes: strategies, barriers, collectives, and the end of all ranks when one fails.

``trainer.strategy`` can name ``rlightning.parallel.FSDP`` or ``rlightning.parallel.DDP``, which are imported on first
access: other modules of this package do not need Lightning and transformers.
"""

from pkgutil import resolve_name
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlightning.parallel.fsdp import FSDP
    from rlightning.parallel.strategy import DDP

__all__ = ["DDP", "FSDP"]

_FILES = {"DDP": "strategy", "FSDP": "fsdp"}


def __getattr__(name: str) -> object:
    if name in _FILES:
        return resolve_name(f"{__name__}.{_FILES[name]}.{name}")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
