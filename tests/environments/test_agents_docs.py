"""The snippets of docs/agents.md about tools run as they are written."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from test_tools import END, answers, call, play

from rlightning.environments import Tools

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")
TOOLS = PAGE.partition("\n## Tools\n")[2].partition("\n## ")[0]


def load(name: str, snippet: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(re.findall(r"```python\n(.*?)```", TOOLS, re.DOTALL)[snippet], vars(module))
    return module


@pytest.mark.processes
def test_tools_of_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load("my_tools", 0, monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "manual.txt").write_text("one two\ntwo three\n")
    first, *_ = re.findall(r"```yaml\n(.*?)```", TOOLS, re.DOTALL)
    environment = Tools(**yaml.safe_load(first)["environment"]["init_args"])
    calls = [call("run_python", program="print(6 * 7)"), call("search", words=["two", "three"]), call("read")]
    trajectory = play(environment, f"{call('write', title='a', note='b')}{END}", "\n".join(calls) + END, f"42{END}")
    assert answers(trajectory) == ["written", "42\n", '["two three"]', json.dumps({"a": "b"})]
    assert trajectory.metrics == {"turns": 3.0, "tool_calls": 4.0, "tool_failures": 0.0}


def test_environment_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = load("my_environment", 1, monkeypatch).AsksOnce()
    calls = [call("double", number=2), call("double", number="2"), call("double", number=3)]
    trajectory = play(environment, "\n".join(calls) + END, f"4{END}")
    assert trajectory.reward == 1.0
    assert answers(trajectory) == ["4", "number is '2', and has to be of type integer.", "6"]
    assert play(environment, f"4{END}").reward == 1.0


def test_line_of_the_log_is_what_is_logged() -> None:
    from chat_templates import make_tokenizer

    from rlightning.environments.chat_format import ChatFormat

    (line,) = re.findall(r"^ *(Chats: .*), \.\.\.$", TOOLS, re.MULTILINE)
    assert ChatFormat(make_tokenizer("qwen3")).describe().startswith(line)
