"""Environments, which turn prompts into finished trajectories. Importing this package needs only the standard library.

Workers import ``worker`` and their environment in other interpreters, which need Python 3.10, msgpack, and the packages
of the environment, such as openai or websockets.
"""

from importlib import import_module
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

if TYPE_CHECKING:
    from rlightning.environments.agent_program import AgentProgram
    from rlightning.environments.worker_environment import WorkerEnvironment

__all__ = [
    "AgentProgram",
    "AskLimitError",
    "AssistantMessage",
    "Environment",
    "LimitReachedError",
    "Message",
    "Places",
    "Policy",
    "PolicyGroup",
    "Reply",
    "SelfCorrection",
    "SingleTurn",
    "StepEnvironment",
    "ToolCall",
    "Tools",
    "WorkerEnvironment",
]


def __getattr__(name: str) -> object:
    """Import a name of this package that only the trainer's process uses, when it is first accessed."""
    modules = {"AgentProgram": "agent_program", "WorkerEnvironment": "worker_environment"}
    if name not in modules:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{modules[name]}"), name)
