"""An engine's process: its environment, and why it ended."""

import pickle
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_models import bare_config

from rlightning.errors import AdapterRefusedError, EngineError, EngineStartError
from rlightning.processes.managed_process import ManagedProcess
from rlightning.rollout.vllm.launcher import EngineProcess, engine_environment, find_cause

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
def test_find_cause_returns_last_error_without_consequences(lines: list[str], cause: str | None) -> None:
    assert find_cause(lines) == cause


def allow_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 64))


def test_engine_process_few_files_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allow_few_files(monkeypatch)
    monkeypatch.setattr(ManagedProcess, "__init__", lambda *_, **__: pytest.fail("a process is started"))
    with pytest.raises(
        EngineStartError, match=r"^An engine cannot start on this host: a process may have 64 files open"
    ):
        EngineProcess(bare_config(tmp_path / "engine.log"))
    assert not list(tmp_path.iterdir())


def explain(lines: list[str], *, has_adapter: bool = False) -> EngineError:
    """The error of an engine that wrote these lines and ended before it was up."""
    engine: Any = object.__new__(EngineProcess)
    engine._process = SimpleNamespace(log_lines=lambda: ["all is well", *lines], describe_end=lambda: "exit code 1")
    engine._is_closing, engine.ready = False, SimpleNamespace(done=lambda: False)
    engine.config = SimpleNamespace(log_file="engine.log", has_adapter=has_adapter)
    engine._process.log_tail = lambda: ""
    error: EngineError = engine._explain("died", 1)
    return error


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
    error = explain(lines)
    assert isinstance(error, EngineStartError)
    assert str(error).startswith("The engine could not start: ") and named in str(error)
    assert ("a process may have 64 files" in str(error)) == ("ValueError" not in named)


def test_what_is_compiled_outlives_the_engines_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    config = bare_config(tmp_path / "log")
    first, second = (engine_environment(config, str(tmp_path / name)) for name in ("first", "second"))
    folders = {name for name in first if first[name] != second[name]}
    assert folders == {"TMPDIR", "VLLM_RPC_BASE_PATH"}  # of sockets; neither is part of a cache's key
    assert not first["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path / "first"))


def test_a_launchers_variables_stay_with_the_trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_NAME", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("RANKING", "stays")
    config = bare_config(tmp_path / "log")
    environment = engine_environment(config, str(tmp_path))
    assert not any(name.startswith(("TORCHELASTIC", "MASTER", "ROLE", "GROUP")) for name in environment)
    assert "RANK" not in environment and environment["RANKING"] == "stays"


@pytest.mark.parametrize(
    ("device", "asked", "threads"), [("cuda", None, "1"), ("cuda", "3", "3"), ("cpu", None, "own")]
)
def test_engine_threads_are_limited_unless_user_sets_them(
    device: str, asked: str | None, threads: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    config = bare_config(tmp_path / "log", device=torch.device(device))
    expected = str(torch.get_num_threads()) if threads == "own" else threads
    assert engine_environment(config, str(tmp_path))["OMP_NUM_THREADS"] == expected


@pytest.mark.parametrize(
    ("cause", "has_adapter", "is_named"),
    [
        ("ValueError: LoRA target module lm.mlp (Linear) could not be wrapped", True, True),
        ("ValueError: LoRA target module lm.mlp (Linear) could not be wrapped", False, False),
        ("ValueError: too small", True, False),
    ],
)
def test_engine_that_refuses_an_adapter_names_merged_weights(cause: str, has_adapter: bool, is_named: bool) -> None:
    error = explain([cause], has_adapter=has_adapter)
    assert isinstance(error, EngineStartError) and f"could not start: {cause} " in str(error)
    assert ("rollout.send_adapter: false" in str(error)) == is_named
    assert isinstance(error, AdapterRefusedError) == is_named and getattr(error, "reason", cause) == cause


def test_refusal_of_an_adapter_reaches_other_processes_whole() -> None:
    error = AdapterRefusedError("The engine could not start: no place for 'mlp'", "no place for 'mlp'")
    error.details = "the end of its log"
    copied = pickle.loads(pickle.dumps(error))
    assert (copied.line, copied.reason, copied.details) == (error.line, error.reason, error.details)
