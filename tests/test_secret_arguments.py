"""Secrets of reward functions: in no file of a run, and there when it is started again."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_project import make_project

from rlightning.__main__ import main
from rlightning.errors import ConfigError
from rlightning.rewards import RewardFunction, RewardRunner
from rlightning.secret_arguments import mask_secrets, resolve_secrets


def judge(completion: str, *, api_key: str, url: str = "") -> float:
    return float(len(api_key))


@pytest.mark.parametrize(
    "name", ["api_key", "API_KEY", "openai_api_key", "token", "hf_token", "secret", "password", "apikey"]
)
def test_mask_secrets_names_a_variable_instead(name: str) -> None:
    def config(value: Any) -> dict[str, Any]:
        return {"model": {"rewards": [{"arguments": {name: value, "url": "u"}}, "f"], "lr": 1.0, "token": "kept"}}

    assert mask_secrets(config("abc")) == config(f"${{ENV:{name.upper()}}}")
    assert mask_secrets(config(123)) == config(f"${{ENV:{name.upper()}}}")
    assert mask_secrets(config("${ENV:OTHER}")) == config("${ENV:OTHER}")
    assert mask_secrets(config(None)) == config(None)


def test_mask_secrets_looks_into_nested_arguments_alone() -> None:
    arguments = {"headers": {"token": "a"}, "clients": [{"password": "b"}], "max_tokens": 5, "keys": "c", "monkey": "d"}
    masked = {**arguments, "headers": {"token": "${ENV:TOKEN}"}, "clients": [{"password": "${ENV:PASSWORD}"}]}
    assert mask_secrets({"arguments": arguments, "key": "e"}) == {"arguments": masked, "key": "e"}


def test_resolve_secrets_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE", "abc")
    assert resolve_secrets({"a": ["Bearer ${ENV:JUDGE}", 1], "b": None}, "x") == {"a": ["Bearer abc", 1], "b": None}
    with pytest.raises(ConfigError, match=r"Reward 'judge': the environment variable NOT_SET is not set\. Set it"):
        RewardRunner([RewardFunction(judge, arguments={"api_key": "${ENV:NOT_SET}"})])
    (function,) = RewardRunner([RewardFunction(judge, arguments={"api_key": "${ENV:JUDGE}"})]).functions
    assert function.arguments == {"api_key": "abc"}
    assert "abc" not in repr(RewardFunction(judge, arguments={"api_key": "abc"}))


@pytest.mark.long
def test_no_file_of_a_run_has_the_secret_and_it_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("logging.raiseExceptions", False)
    (tmp_path / "my_judge.py").write_text("def judge(completion, *, api_key):\n    return 1.0\n")
    rewards = [{"function": "my_judge.judge", "arguments": {"api_key": "sk-abcdef"}}]
    (tmp_path / "judge.yaml").write_text(yaml.safe_dump({"model": {"init_args": {"rewards": rewards}}}))
    folder = tmp_path / "run"
    fit = ["fit", "--trainer.default_root_dir", str(folder), "--trainer.max_steps"]
    assert main([*fit, "1", "--config", "run.yaml", "--config", "judge.yaml", "--trainer.max_steps", "1"]) == 0
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {"config.yaml", "report.html", "last.ckpt"} <= {path.name for path in files}
    assert not [path.name for path in files if b"sk-abcdef" in path.read_bytes()]
    resume = ["--config", str(folder / "config.yaml"), "--trainer.max_steps", "2", "--ckpt_path", "last"]
    monkeypatch.delenv("API_KEY", raising=False)
    assert main([*fit, "2", *resume]) == 2
    monkeypatch.setenv("API_KEY", "sk-abcdef")
    assert main([*fit, "2", *resume]) == 0
    assert "step=2" in " ".join(path.name for path in folder.rglob("*.ckpt"))
