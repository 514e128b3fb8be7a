"""The default environment: the policy answers the prompt in one turn."""

from __future__ import annotations

from rlightning.environments.environment import Environment, Policy, PolicyGroup
from rlightning.types.trajectory import Outcome, Prompt


class SingleTurn(Environment):
    """One turn; a single request samples all completions of a prompt, so that the engine prefills the prompt once."""

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        """Sample one completion of the prompt, and return an outcome without a reward."""
        await policy.chat()
        return Outcome()

    async def run_group(self, prompt: Prompt, group: PolicyGroup) -> list[Outcome]:
        """Sample all completions of a prompt in a single request, and return outcomes without rewards."""
        return await group.sample_all()
