"""From prompts to finished trajectories. Importing this needs the standard library alone."""

from rlightning.environments.environment import Environment, LimitReachedError, Message, Policy, PolicyGroup
from rlightning.environments.self_correction import SelfCorrection
from rlightning.environments.single_turn import SingleTurn

__all__ = ["Environment", "LimitReachedError", "Message", "Policy", "PolicyGroup", "SelfCorrection", "SingleTurn"]
