"""An environment for verifiers with two agents that are trained, one against the other."""

# mypy: disable-error-code="misc"

from typing import Any

import verifiers.v1 as vf

__all__ = ["TwoSeatsEnv"]


class TwoSeatsConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class TwoSeatsEnv(vf.Env[TwoSeatsConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        await agents.first.run(task)
        await agents.second.run(task)
