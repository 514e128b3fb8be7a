"""An environment of two turns: the policy answers, and answers again after a message that the answer is wrong."""

from __future__ import annotations

from rlightning.environments.environment import Environment, Policy
from rlightning.types.trajectory import Outcome, Prompt


class SelfCorrection(Environment):
    """Tells the policy when its answer is wrong and has it answer again; a correct answer ends the trajectory.

    The environment gives no reward: reward functions score the last answer.

    Args:
        answer_column: column of the right answer, which the policy's text must equal except for surrounding spaces.
        verdict: message to the policy after a wrong answer.
    """

    def __init__(self, answer_column: str = "answer", verdict: str = "That is wrong. Answer again.") -> None:
        self.answer_column, self.verdict = answer_column, verdict

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        """Make one trajectory; its metrics say whether the first and the last answer were right."""
        right = str(prompt.columns[self.answer_column]).strip()
        first = last = await policy.chat()
        if first.text.strip() != right:
            last = await policy.chat({"role": "user", "content": self.verdict})
        verdicts = {"first_right": first.text.strip() == right, "last_right": last.text.strip() == right}
        return Outcome(metrics={name: float(value) for name, value in verdicts.items()})
