"""The usual environment: the policy answers the prompt, and that is all."""

from __future__ import annotations

from rlightning.environments.environment import Environment, Policy, PolicyGroup
from rlightning.types.trajectory import Outcome, Prompt


class SingleTurn(Environment):
    """One turn; the completions of a prompt are sampled by one request, which computes the prompt once."""

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        """Sample one completion."""
        await policy.chat()
        return Outcome()

    async def run_group(self, prompt: Prompt, group: PolicyGroup) -> list[Outcome]:
        """Sample all completions."""
        return await group.sample_all()
