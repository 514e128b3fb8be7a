"""An environment whose policy computes with Python: it writes programs, reads what they print, and answers.

With PYTHONPATH=examples:

    environment:
      class_path: rlightning.environments.WorkerEnvironment
      init_args: {environment: python_tool.PythonTool, arguments: {max_turns: 4}}
"""

from __future__ import annotations

import re

from rlightning.environments import Environment
from rlightning.environments.environment import Policy
from rlightning.environments.python_sandbox import CodeRunner, PythonSandbox
from rlightning.types.trajectory import Outcome, Prompt

PROGRAM = re.compile(r"```python\n(.*?)```", re.DOTALL)


class PythonTool(Environment):
    """Runs the program of each turn; a turn without a program is the answer.

    Args:
        answer_column: of the prompt set; an answer is right if this text is its last word.
        max_turns: of the policy.
        runner: of the programs; None: a :class:`PythonSandbox`.
    """

    def __init__(self, answer_column: str = "answer", max_turns: int = 4, runner: CodeRunner | None = None) -> None:
        self.answer_column, self.max_turns = answer_column, max_turns
        self.runner = runner or PythonSandbox()

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        """Make one trajectory; its reward is 1 for a right answer."""
        sample = await policy.chat()
        num_programs = 0
        while (program := PROGRAM.search(sample.text)) and num_programs < self.max_turns - 1:
            num_programs += 1
            result = await self.runner.run(program[1])
            output = f"{result.stdout}{result.stderr}"
            if result.status != "finished":
                output += f"[{result.status}]"
            sample = await policy.chat({"role": "user", "content": output})
        is_right = sample.text.split()[-1:] == [str(prompt.columns[self.answer_column])]
        return Outcome(reward=float(is_right), metrics={"num_programs": num_programs})
