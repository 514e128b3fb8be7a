"""Tasks of reasoning-gym as an environment."""

import asyncio
import sys

import pytest
from attempts import PROMPT, CannedPolicy, play
from pages import read_environment, read_section

from rlightning.environments.reasoning_gym import ReasoningGym
from rlightning.errors import ConfigError


def test_question_is_scored_by_its_task() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    entry = reasoning_gym.create_dataset("chain_sum", size=2, seed=5)[PROMPT.index % 2]
    environment = ReasoningGym("chain_sum", size=2, seed=5)
    asyncio.run(environment.check())
    policies = [CannedPolicy(text.format(entry["answer"])) for text in ("{}", "So <answer>{}</answer>.", "none")]
    assert [play(environment, policy).reward for policy in policies] == [1.0, 1.0, 0.0]
    ((message,),) = policies[0].heard
    assert message["content"].startswith(entry["question"]) and message["content"].endswith("</answer>.")
    with pytest.raises(ConfigError, match=r"^dataset=chain_sun is no task of reasoning-gym\. Did you mean 'chain_sum'"):
        asyncio.run(ReasoningGym("chain_sun").check())
    with pytest.raises(ConfigError, match=r"^dataset=chain_sum refuses its arguments: .*'hard'\.$"):
        asyncio.run(ReasoningGym("chain_sum", arguments={"hard": 1}).check())


def test_section_of_the_page_runs() -> None:
    pytest.importorskip("reasoning_gym")
    environment = read_environment(read_section("environments.md", "Tasks of reasoning-gym"))
    assert environment["class_path"] == f"{ReasoningGym.__module__}.ReasoningGym"
    assert play(ReasoningGym(**environment["init_args"]), CannedPolicy("none")).reward == 0.0


def test_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(
        ConfigError, match=r"^ReasoningGym: .*reasoning_gym.*\. Install it: pip install reasoning-gym\.$"
    ):
        asyncio.run(ReasoningGym("chain_sum").check())
