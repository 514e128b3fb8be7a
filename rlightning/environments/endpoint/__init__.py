"""An OpenAI-compatible server in the trainer's process: what agents sample through it is recorded as it was sampled."""

from rlightning.environments.endpoint.server import Endpoint
from rlightning.environments.endpoint.session import Session

__all__ = ["Endpoint", "Session"]
