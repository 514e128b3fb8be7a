"""Several processes: strategies, barriers, and what ranks tell each other.

``trainer.strategy`` can name ``rlightning.distributed.FSDP`` or ``rlightning.distributed.DDP``, which are imported when
they are asked for: other parts of this folder do without Lightning and transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlightning.distributed.ddp import DDP
    from rlightning.distributed.fsdp import FSDP

__all__ = ["DDP", "FSDP"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"{__name__}.{name.lower()}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
