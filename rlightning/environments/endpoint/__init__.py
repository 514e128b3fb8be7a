"""An OpenAI-compatible server in the trainer's process, which records the tokens that agents sample through it."""

from rlightning.environments.endpoint.server import Endpoint
from rlightning.environments.endpoint.session import Session

__all__ = ["Endpoint", "Session"]
