import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlightning.errors import EngineStartError
from rlightning.processes.managed_process import ManagedProcess
from rlightning.rollout.engine_config import EngineConfig
from rlightning.rollout.vllm.launcher import EngineProcess, find_cause

PREFIX = "(EngineCore pid=7) ERROR 11-25 13:46:07 [core.py:15]"
TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "/vllm/moe.py", line 185, in make',
    "    assert sizes[top_k]",
]
CONSEQUENCE = "RuntimeError: Engine core initialization failed. See root cause above."


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ([], None),
        (["all is well"], None),
        (["ValueError: too small"], "ValueError: too small"),
        (["ValueError: first", "ValueError: second", CONSEQUENCE], "ValueError: second"),
        ([*TRACEBACK, "AssertionError", CONSEQUENCE], "AssertionError in moe.py, line 185: assert sizes[top_k]"),
        (
            [f"{PREFIX} {line}" for line in [*TRACEBACK, "           ^^^^", "AssertionError"]],
            "AssertionError in moe.py, line 185: assert sizes[top_k]",
        ),
        ([*TRACEBACK, "torch.OutOfMemoryError: 2 GiB"], "OutOfMemoryError: 2 GiB"),
        (["Fatal Python error: Bus error", "", "Current thread:", CONSEQUENCE], "Fatal Python error: Bus error"),
        (["terminate called after throwing an instance of 'std::system_error'", "  what():  Resource"], "Resource"),
    ],
)
def test_find_cause_takes_the_last_error_that_is_no_consequence(lines: list[str], cause: str | None) -> None:
    assert find_cause(lines) == cause


def allow_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 64))


def test_engine_process_few_files_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allow_few_files(monkeypatch)
    monkeypatch.setattr(ManagedProcess, "__init__", lambda *_, **__: pytest.fail("a process is started"))
    with pytest.raises(
        EngineStartError, match=r"^An engine cannot start on this host: a process may have 64 files open"
    ):
        EngineProcess(
            EngineConfig(
                engine_args={}, device=torch.device("cpu"), dtype=torch.float32, log_file=tmp_path / "engine.log"
            )
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ([], "a process may have 64 files open at once"),
        (["Fatal Python error: Bus error"], "Fatal Python error: Bus error "),
        (["ValueError: too small"], "ValueError: too small"),
    ],
)
def test_engine_end_without_cause_names_what_host_lacks(
    lines: list[str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow_few_files(monkeypatch)
    engine: Any = object.__new__(EngineProcess)
    engine._process = SimpleNamespace(log_lines=lambda: ["all is well", *lines], describe_end=lambda: "exit code 1")
    engine._is_closing, engine.ready = False, SimpleNamespace(done=lambda: False)
    engine.config = SimpleNamespace(log_file="engine.log")
    engine._process.log_tail = lambda: ""
    error = engine._explain("died", 1)
    assert isinstance(error, EngineStartError)
    assert str(error).startswith("The engine could not start: ") and named in str(error)
    assert ("a process may have 64 files" in str(error)) == ("ValueError" not in named)
