"""Tasks of reasoning-gym as an environment."""

import asyncio
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from test_step_environment import PROMPT, CannedPolicy, play

from rlightning.environments import Message, Reply
from rlightning.environments.reasoning_gym import ReasoningGym
from rlightning.errors import ConfigError
from rlightning.types import Sample


class Answers(CannedPolicy):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    async def chat(self, *observations: Message, tools: Sequence[Message] | None = None) -> Reply:
        self.heard.append(observations)
        return Reply(Sample([7], [-0.1], [2], self.text, "stop"))


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


def test_section_of_the_page_runs() -> None:
    pytest.importorskip("reasoning_gym")
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
    section = page.partition("\n## Tasks of reasoning-gym\n")[2].partition("\n## ")[0]
    (text,) = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    environment = yaml.safe_load(text)["environment"]
    assert environment["class_path"] == f"{ReasoningGym.__module__}.ReasoningGym"
    assert play(ReasoningGym(**environment["init_args"]), Answers("none")).reward == 0.0


def test_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(
        ConfigError, match=r"^ReasoningGym: .*reasoning_gym.*\. Install it: pip install reasoning-gym\.$"
    ):
        asyncio.run(ReasoningGym("chain_sum").check())
