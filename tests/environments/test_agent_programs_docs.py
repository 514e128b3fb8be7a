"""The snippets of docs/agents.md about agent programs and the endpoint run as they are written."""

import asyncio
import inspect
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from test_agent_program import attempt

from rlightning.environments import AgentProgram
from rlightning.environments.endpoint import Endpoint
from rlightning.environments.endpoint.server import ROUTES
from rlightning.types import BranchReason

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")
PROGRAMS, ENDPOINT = PAGE.partition("\n## Agent programs\n")[2].split("\n## The endpoint\n")


@pytest.mark.long
def test_agent_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PROGRAMS, re.DOTALL)
    (tmp_path / "my_agents_of_docs.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    section = re.findall(r"```yaml\n(.*?)```", PROGRAMS, re.DOTALL)[0].replace("my_agents", "my_agents_of_docs")
    arguments = yaml.safe_load(section)["environment"]["init_args"]
    (one,) = attempt(AgentProgram(**arguments), "Two.", "#### 2")
    assert (one.status, one.reward, len(one.samples), len(one.branches)) == ("finished", 1.0, 2, 1)
    (one,) = attempt(AgentProgram(**arguments), *["Two."] * 4)
    assert (one.status, one.reward, len(one.samples)) == ("finished", 0.0, 4)


def test_keys_of_the_page() -> None:
    section = re.findall(r"```yaml\n(.*?)```", PROGRAMS, re.DOTALL)[1]
    assert AgentProgram(**yaml.safe_load(section)["environment"]["init_args"]).command is not None
    for key in inspect.signature(Endpoint).parameters:
        assert f"`{key}`" in ENDPOINT
    assert [route for route in ROUTES if f"| `{route}` |" not in ENDPOINT] == []
    assert [reason for reason in get_args(BranchReason) if f"`{reason}`" not in ENDPOINT] == []


def test_environment_of_the_page() -> None:
    async def my_client(base_url: str, key: str, prompt: Any) -> float:
        import openai

        async with openai.AsyncOpenAI(base_url=base_url, api_key=key) as client:
            answer = await client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": prompt.text}], top_p=0.5
            )
        return len(answer.choices[0].message.content or "")

    (code,) = re.findall(r"```python\n(.*?)```", ENDPOINT, re.DOTALL)
    names: dict[str, Any] = {"my_client": my_client}
    exec(code, names)
    (one,) = attempt(names["OwnClient"](), "Two.")
    assert one.reward == 4.0
    asyncio.run(names["OwnClient"]().close())
