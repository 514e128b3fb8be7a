"""Runs of several processes: strategies, barriers, collectives, and the end of all ranks when one fails.

``trainer.strategy`` can name ``rlightning.parallel.FSDP`` or ``rlightning.parallel.DDP``, which are imported on first
access: other modules of this package do not need Lightning and transformers.
"""

from typing import TYPE_CHECKING

from rlightning.lazy import lazy_import

if TYPE_CHECKING:
    from rlightning.parallel.fsdp import FSDP
    from rlightning.parallel.strategy import DDP

__all__ = ["DDP", "FSDP"]

__getattr__ = lazy_import(__name__, {"DDP": "strategy", "FSDP": "fsdp"})
