"""The named algorithms, one in each file; docs/algorithms.md compares them.

Each is an :class:`~rlightning.module.RLModule` with its own advantage and loss, and with its paper's defaults for the
arguments that define the algorithm. The size of a step (prompts, samples, updates) depends on hardware and task, and
has RLModule's defaults.
"""

from rlightning.algorithms.cispo import CISPO
from rlightning.algorithms.dapo import DAPO
from rlightning.algorithms.dr_grpo import DrGRPO
from rlightning.algorithms.grpo import GRPO
from rlightning.algorithms.gspo import GSPO
from rlightning.algorithms.reinforce_plus_plus import REINFORCEPlusPlus, REINFORCEPlusPlusBaseline
from rlightning.algorithms.rloo import RLOO
from rlightning.algorithms.sapo import SAPO
from rlightning.algorithms.sft import SFT

__all__ = [
    "CISPO",
    "DAPO",
    "GRPO",
    "GSPO",
    "RLOO",
    "SAPO",
    "SFT",
    "DrGRPO",
    "REINFORCEPlusPlus",
    "REINFORCEPlusPlusBaseline",
]
