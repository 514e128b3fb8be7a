"""Environments in workers of other interpreters: what these need, and what cannot start, which is one line."""

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest
import yaml
from attempts import CannedPolicy
from pages import DOCS, find_snippets
from worker_attempts import DEEDS, Replies, attempt, make, make_prompt, run

from rlightning.environments import Message, Reply, WorkerEnvironment
from rlightning.environments.messages import AssistantMessage, ToolCall
from rlightning.errors import ConfigError
from rlightning.types import Sample

pytestmark = pytest.mark.processes


class Calls(CannedPolicy):
    """Calls a tool, and says what it got."""

    async def chat(self, *observations: Message, tools: Sequence[Message] | None = None) -> Reply:
        reply = await super().chat(*observations, tools=tools)
        calls = () if len(self.heard) > 1 else (ToolCall("1", "add", '{"a": 1, "b": 2}'),)
        if not calls:
            assert [one["content"] for one in observations] == ["3"]
        return Reply(reply, AssistantMessage("", None, calls))


def make_python(python: str, folder: Path) -> str:
    """An interpreter with msgpack, and nothing else; without its extension if it is another version."""
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
    (site_packages,) = (folder / "lib").glob("python*/site-packages")
    (site_packages / "msgpack").symlink_to(Path(msgpack.__file__).parent)
    return str(folder / "bin" / "python")


@pytest.fixture(scope="module")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_python(sys.executable, tmp_path_factory.mktemp("other"))


def find_python(version: str) -> str | None:
    """The interpreter of a version in PATH, or among pyenv's, whose shims in PATH may not run; None without one."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    folders = [one for one in os.environ["PATH"].split(os.pathsep) if Path(one).name != "shims"]
    folders += [str(one) for one in sorted(pyenv.glob(f"versions/{version}.*/bin"))]
    return shutil.which(f"python{version}", path=os.pathsep.join(folders))


VERSIONS = [one for one in (f"3.{minor}" for minor in range(10, 15)) if one != "{}.{}".format(*sys.version_info)]
FIRST_VERSION = next(filter(find_python, VERSIONS), None)
"""The oldest that there is, whose test is not slow."""


@pytest.mark.parametrize(
    "version", [pytest.param(one, marks=[pytest.mark.slow] if one != FIRST_VERSION else []) for one in VERSIONS]
)
def test_worker_runs_in_each_version_of_python(version: str, tmp_path: Path) -> None:
    """It gets the numbers that it sends and receives, its errors, and the tools of a trajectory."""
    found = find_python(version)
    if found is None:
        pytest.skip(f"there is no python{version} in PATH")
    python = make_python(found, tmp_path / "other")

    async def work() -> None:
        environment = make(tmp_path, python=python)
        await environment.check()
        [answered, failed] = await attempt(environment, "answer", "raise")
        assert (answered.status, answered.metrics["heavy"]) == ("finished", 0)
        assert answered.metrics["version"] == int(version.partition(".")[2])
        assert answered.reward == Sample([], [-0.1], [], "", "stop").logprobs[0]
        assert str(failed.error).rstrip().endswith("ConnectionError: the sandbox is gone")
        await environment.close()
        tools = {"tools": ["tool_cases.add", "tool_cases.greet"]}
        environment = WorkerEnvironment("rlightning.environments.Tools", tools, python=python)
        outcome = await environment.run(make_prompt("hi"), Calls())
        assert (outcome.status, outcome.metrics) == (
            "finished",
            {"turns": 2.0, "tool_calls": 1.0, "tool_failures": 0.0},
        )
        await environment.close()

    run(work())


def test_other_interpreter_needs_msgpack_alone(tmp_path: Path, other_python: str) -> None:
    async def work() -> None:
        environment = make(tmp_path, python=other_python)
        await environment.check()
        outcome = await environment.run(make_prompt("answer"), Replies())
        assert (outcome.status, outcome.metrics["heavy"]) == ("finished", 0)
        await environment.close()

    run(work())


def test_section_of_the_page_runs(tmp_path: Path, other_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (DOCS / "environments.md").read_text(encoding="utf-8")
    (tmp_path / "guess_number.py").write_text(find_snippets(page)[0])
    section = next(text for text in find_snippets(page, "yaml") if "WorkerEnvironment" in text)
    (tmp_path / "agents").symlink_to(Path(other_python).parents[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    async def work() -> None:
        environment = WorkerEnvironment(**yaml.safe_load(section)["environment"]["init_args"])
        await environment.check()
        outcome = await environment.run(make_prompt("1+1=", answer="7"), Replies("7"))
        assert (outcome.reward, outcome.metrics) == (1.0, {"turns": 1})
        await environment.close()

    run(work())


@pytest.mark.parametrize(
    ("environment", "arguments", "line"),
    [
        ("Deeds", {}, r"^environment\.environment=Deeds is no dotted path\. Write module\.name, such as my_package"),
        ("no_package.Deeds", {}, r"=no_package\.Deeds cannot be imported by .*/python: ModuleNotFoundError: No module"),
        ("worker_cases.Deed", {}, r"Deed: 'worker_cases' has no class or function 'Deed'\. Did you mean 'Deeds'\?"),
        ("worker_cases.Other", {}, r"Other is a class that is no environment\. Name a subclass of rlightning\."),
        ("worker_cases.NeedsRoom", {}, r"cannot be made with no arguments: TypeError: .* argument: 'rooms'\. Change"),
        ("worker_cases.NeedsRoom", {"rooms": 0}, r"with the arguments rooms: OSError: no room is free\. Change"),
    ],
)
def test_environment_that_cannot_be_made_is_one_line(
    other_python: str, environment: str, arguments: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError, match=line) as raised:
        asyncio.run(WorkerEnvironment(environment, arguments, python=other_python).check())
    assert "\n" not in raised.value.line


def test_environment_whose_module_raises_is_one_line(
    other_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_deeds.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    line = r"^environment\.environment=broken_deeds\.Deeds cannot be imported by .*/python: ZeroDivisionError: .*zero "
    with pytest.raises(ConfigError, match=line + rf"\({tmp_path}/broken_deeds\.py, line 1\)\. Fix its module\.\n"):
        asyncio.run(WorkerEnvironment("broken_deeds.Deeds", python=other_python).check())


@pytest.mark.parametrize(
    ("program", "line"),
    [
        (None, "cannot be started: No such file or directory. Give the path"),
        ("echo hello", "is no Python. Give the path"),
        ("echo 3.9", "is Python 3.9; workers need 3.10 or later."),
        ("echo 3.10; exit 1", "has no msgpack, which workers need. Install it: "),
    ],
)
def test_unusable_interpreter_is_one_line(tmp_path: Path, program: str | None, line: str) -> None:
    python = tmp_path / "python"
    if program is not None:
        python.write_text(f"#!/bin/sh\n{program}\n")
        python.chmod(0o755)
    with pytest.raises(ConfigError, match=re.escape(f"environment.python={python} {line}")):
        asyncio.run(make(tmp_path, python=str(python)).check())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"num_workers": 0}, "environment.num_workers=0 must be at least 1."),
        ({"max_trajectories": 0}, "environment.max_trajectories=0 must be at least 1."),
        ({"hang_timeout": 0}, "environment.hang_timeout=0 must be above 0 seconds."),
        (
            {"arguments": {"client": object()}},
            "environment.arguments cannot be sent to a worker: A message holds",
        ),
    ],
)
def test_wrong_argument_is_one_line(arguments: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}"):
        WorkerEnvironment(DEEDS, **arguments)
