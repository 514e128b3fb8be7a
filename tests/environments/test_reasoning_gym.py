"""Tasks of reasoning-gym as an environment."""

import asyncio
import sys

import pytest
from test_step_environment import PROMPT, CannedPolicy, play

from rlightning.environments import ReasoningGym
from rlightning.errors import ConfigError
from rlightning.types import Sample


class Answers(CannedPolicy):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    async def chat(self, *observations: dict[str, str]) -> Sample:
        self.heard.append(observations)
        return Sample([7], [-0.1], [2], self.text, "stop")


def test_question_is_scored_by_its_task() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    entry = reasoning_gym.create_dataset("chain_sum", size=2, seed=5)[PROMPT.index % 2]
    environment = ReasoningGym("chain_sum", size=2, seed=5)
    asyncio.run(environment.check())
    right, tagged, wrong = Answers(entry["answer"]), Answers(f"So <answer>{entry['answer']}</answer>."), Answers("none")
    assert [play(environment, policy).reward for policy in (right, tagged, wrong)] == [1.0, 1.0, 0.0]
    ((message,),) = right.heard
    assert message["content"].startswith(entry["question"]) and message["content"].endswith("</answer>.")
    with pytest.raises(ConfigError, match=r"^dataset=chain_sun is no task of reasoning-gym\. Did you mean 'chain_sum'"):
        asyncio.run(ReasoningGym("chain_sun").check())
    with pytest.raises(ConfigError, match=r"^dataset=chain_sum refuses its arguments: .*'hard'\.$"):
        asyncio.run(ReasoningGym("chain_sum", arguments={"hard": 1}).check())


def test_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(
        ConfigError, match=r"^ReasoningGym: .*reasoning_gym.*\. Install it: pip install reasoning-gym\.$"
    ):
        asyncio.run(ReasoningGym("chain_sum").check())
