"""RL post-training for language models, the Lightning way."""

from typing import TYPE_CHECKING

from rlightning.lazy import lazy_import

if TYPE_CHECKING:
    from rlightning.module import RLModule
    from rlightning.trainer import Trainer

__all__ = ["RLModule", "Trainer"]

# So that the command's ``--help`` does not import torch.
__getattr__ = lazy_import(__name__, {"RLModule": "module", "Trainer": "trainer"})
