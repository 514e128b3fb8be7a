"""The tasks of the package reasoning-gym, which generates questions and scores answers."""

from __future__ import annotations

import asyncio
from functools import cached_property
from types import ModuleType
from typing import Any

from rlightning.environments.environment import Environment, Policy
from rlightning.errors import ConfigError, did_you_mean
from rlightning.foreign_text import cut_line
from rlightning.types.trajectory import Outcome, Prompt

INSTRUCTIONS = "Write the final answer between <answer> and </answer>."


class ReasoningGym(Environment):
    """Asks a generated question in place of the prompt, chosen by the prompt's index; the reward is the task's score.

    The answer is the text between the last ``<answer>`` tags, or all of the text.

    Args:
        dataset: name of the task, such as "chain_sum".
        size: number of questions.
        seed: determines the questions.
        instructions: text after the question.
        arguments: additional arguments of the task, such as its difficulty.
    """

    def __init__(
        self,
        dataset: str,
        *,
        size: int = 500,
        seed: int = 0,
        instructions: str = INSTRUCTIONS,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        self.dataset, self.instructions = dataset, instructions
        self.arguments = {"size": size, "seed": seed, **(arguments or {})}

    @cached_property
    def _package(self) -> ModuleType:
        try:
            import reasoning_gym.factory
            import reasoning_gym.utils
        except ImportError as error:
            raise ConfigError(f"ReasoningGym: {cut_line(error)}. Install it: pip install reasoning-gym.") from error
        package: ModuleType = reasoning_gym
        return package

    @cached_property
    def _questions(self) -> Any:
        """The task's data set, a sequence of questions that scores answers; the package has no type hints."""
        known = self._package.factory.DATASETS
        if self.dataset not in known:
            raise ConfigError(
                f"dataset={self.dataset} is no task of reasoning-gym. {did_you_mean(self.dataset, known)}"
            )
        try:
            return self._package.create_dataset(self.dataset, **self.arguments)
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(f"dataset={self.dataset} refuses its arguments: {cut_line(error)}.") from error

    async def check(self) -> None:
        """Raise a ConfigError if the package or the task is missing, or the task rejects its arguments."""
        await asyncio.to_thread(lambda: self._questions)

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        """Ask the policy the question of the prompt's index; return the outcome with the answer's score as reward."""
        questions = self._questions
        entry = await asyncio.to_thread(questions.__getitem__, prompt.index % len(questions))
        text = f"{entry['question']}\n{self.instructions}".strip()
        sample = await policy.chat({"role": "user", "content": text})
        answer = self._package.utils.extract_answer(sample.text) or sample.text.strip()
        return Outcome(reward=float(await asyncio.to_thread(questions.score_answer, answer, entry)))
