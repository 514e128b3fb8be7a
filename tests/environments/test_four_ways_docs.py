"""The four ways at the top of docs/agents.md run as they are written."""

import asyncio
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from agent_cases import ScriptedSampler
from chat_templates import make_tokenizer
from test_tools import END, call

from rlightning.environments import AgentProgram, Environment, StepEnvironment, Tools
from rlightning.environments.chat_format import ChatFormat
from rlightning.environments.policy import GroupRequest
from rlightning.environments.recorded_group import RecordedGroup
from rlightning.environments.verifiers import Verifiers
from rlightning.rollout import Sampling
from rlightning.types import Prompt, Trajectory

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")
WAYS = PAGE.partition("\n## Four ways\n")[2].partition("\n## ")[0]
PROMPT = Prompt(0, "2+2=", [5, 6], {"prompt": "2+2=", "answer": "4"})


def make(number: int, kind: type[Environment]) -> Environment:
    section = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", WAYS, re.DOTALL)[number])["environment"]
    assert section["class_path"].rpartition(".")[2] == kind.__name__
    return kind(**section["init_args"])


def play(environment: Environment, *texts: str) -> Trajectory:
    tokenizer = make_tokenizer("qwen3")
    sampler: Any = ScriptedSampler(tokenizer, *texts, end=END)
    request = GroupRequest(PROMPT, Sampling(max_new_tokens=200), 1)
    group = RecordedGroup(sampler, ChatFormat(tokenizer), request, 4000, 60.0)

    async def run() -> Any:
        try:
            return await environment.run_group(PROMPT, group)
        finally:
            await environment.close()

    (trajectory,) = group.finish(asyncio.run(run()), 0.0)
    assert (trajectory.status, trajectory.error) == ("finished", None)
    return trajectory


def test_each_way_runs_as_the_page_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    snippets = re.findall(r"```python\n(.*?)```", WAYS, re.DOTALL)
    for name, snippet in zip(("my_tools", "my_games", "my_agents"), snippets, strict=True):
        module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(snippet, vars(module))
    called = play(make(0, Tools), call("add", a=2, b=2), "4")
    assert [turn.message["content"] for turn in called.turns[1:]] == ["4", "4"]
    assert play(make(1, StepEnvironment), "5", "4").turn_rewards == [0.0, 1.0]
    assert play(make(2, AgentProgram), "4").reward == 1.0
    verifiers = make(3, Verifiers)
    assert isinstance(verifiers, Verifiers) and verifiers.config["taskset"]["game"] == "Hangman-v0"
