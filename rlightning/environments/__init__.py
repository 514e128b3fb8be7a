"""Environments, which turn prompts into finished trajectories. Importing this package needs only the standard library.

Workers import ``worker`` and their environment in other interpreters, which need Python 3.10, msgpack, and the packages
of the environment, such as openai or websockets.
"""

from typing import TYPE_CHECKING

from rlightning.environments.environment import (
    AskLimitError,
    Environment,
    LimitReachedError,
    Places,
    Policy,
    PolicyGroup,
    Reply,
)
from rlightning.environments.messages import AssistantMessage, Message, ToolCall
from rlightning.environments.self_correction import SelfCorrection
from rlightning.environments.single_turn import SingleTurn
from rlightning.environments.step_environment import StepEnvironment
from rlightning.environments.tools import Tools
from rlightning.lazy import lazy_import

if TYPE_CHECKING:
    from rlightning.environments.agent_program import AgentProgram
    from rlightning.environments.openenv import OpenEnv
    from rlightning.environments.reasoning_gym import ReasoningGym
    from rlightning.environments.self_judged import SelfJudged
    from rlightning.environments.verifiers import Verifiers
    from rlightning.environments.worker_environment import WorkerEnvironment

__all__ = [
    "AgentProgram",
    "AskLimitError",
    "AssistantMessage",
    "Environment",
    "LimitReachedError",
    "Message",
    "OpenEnv",
    "Places",
    "Policy",
    "PolicyGroup",
    "ReasoningGym",
    "Reply",
    "SelfCorrection",
    "SelfJudged",
    "SingleTurn",
    "StepEnvironment",
    "ToolCall",
    "Tools",
    "Verifiers",
    "WorkerEnvironment",
]

# Not every user of this package needs these modules.
__getattr__ = lazy_import(
    __name__,
    {
        "AgentProgram": "agent_program",
        "OpenEnv": "openenv",
        "ReasoningGym": "reasoning_gym",
        "SelfJudged": "self_judged",
        "Verifiers": "verifiers",
        "WorkerEnvironment": "worker_environment",
    },
)
