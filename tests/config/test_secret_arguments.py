"""Secrets of reward functions: in no file of a run, and there when it is started again."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_project import make_project
from lightning.pytorch import Trainer

from rlightning.__main__ import main
from rlightning.algorithms import DAPO, GRPO, SFT
from rlightning.callbacks import VLLMRollout
from rlightning.config.secret_arguments import is_secret, mask_secrets, resolve_secrets
from rlightning.data import PromptDataModule, ValidationSet
from rlightning.errors import ConfigError
from rlightning.rewards import RewardFunction, RewardRunner


def judge(completion: str, *, api_key: str, url: str = "") -> float:
    return float(len(api_key))


SECRETS = [
    "api_key", "API_KEY", "openai_api_key", "openaiApiKey", "X-API-Key", "APIKey", "apikey",
    "key", "judge_key", "token", "hf_token", "accessToken", "secret", "clientSecret",
    "password", "passphrase", "pwd", "auth", "bearer", "Authorization", "authorization",
    "session_cookie",
]  # fmt: skip
CONTAINERS = ["api_keys", "tokens", "secrets", "credentials", "auth", "api_key", "access_tokens"]
OTHERS = [
    "answer_key", "stop_token", "stopToken", "stop_tokens", "eos_token", "max_token", "num_key",
    "keys", "json_keys", "monkey", "tokenizer", "author", "url", "key_name",
    "password_file", "secret_name", "verdict_token", "public_key", "special_tokens", "keyword",
]  # fmt: skip


@pytest.mark.parametrize("name", SECRETS)
def test_mask_secrets_names_a_variable_instead(name: str) -> None:
    def config(value: Any) -> dict[str, Any]:
        return {"model": {"rewards": [{"arguments": {name: value, "url": "u"}}, "f"], "lr": 1.0}}

    variable = name.upper().replace("-", "_")
    assert mask_secrets(config("abc")) == (config(f"${{ENV:{variable}}}"), {variable: "abc"})
    for value in (None, 123, 1.5, True, "", "${ENV:OTHER}", "Bearer ${ENV:OTHER}"):
        assert mask_secrets(config(value)) == (config(value), {})


def test_no_key_of_the_package_is_a_secret() -> None:
    classes = (GRPO, DAPO, SFT, PromptDataModule, ValidationSet, VLLMRollout, Trainer, RewardFunction)
    assert not [name for kind in classes for name in inspect.signature(kind).parameters if is_secret(name)]


@pytest.mark.parametrize("name", OTHERS)
def test_mask_secrets_keeps_what_is_no_secret(name: str) -> None:
    config = {"arguments": {name: "final", "inner": {name: ["</s>"]}}}
    assert mask_secrets(config) == (config, {})
    names = {"columns": {"token": "t"}, "data": {"validation": {"auth": "auth.jsonl", "secrets": {"path": "s.jsonl"}}}}
    assert mask_secrets(names) == (names, {})


@pytest.mark.parametrize("name", CONTAINERS)
def test_mask_secrets_takes_all_that_is_in_a_container(name: str) -> None:
    upper = name.upper()
    masked, variables = mask_secrets({"f": [{name: {"a": "x", "b": [{"c": "y"}, 3]}}], "d": "z"})
    assert masked == {"f": [{name: {"a": f"${{ENV:{upper}_A}}", "b": [{"c": f"${{ENV:{upper}_C}}"}, 3]}}], "d": "z"}
    assert variables == {f"{upper}_A": "x", f"{upper}_C": "y"}


def test_mask_secrets_goes_over_all_classes_and_into_urls() -> None:
    config: dict[str, Any] = {
        "model": {"class_path": "a.Own", "init_args": {"api_key": "k"}},
        "trainer": {"logger": {"class_path": "b.Log", "init_args": {"hf_token": "t", "name": "n"}}},
        "urls": ["https://user:pw@host/a?x=1&api_key=q&z=2", "http://host:80/a@b?key=r", "see https://u:v@w"],
    }
    masked, variables = mask_secrets(config)
    assert masked["model"]["init_args"] == {"api_key": "${ENV:OWN_API_KEY}"}
    assert masked["trainer"]["logger"]["init_args"] == {"hf_token": "${ENV:HF_TOKEN}", "name": "n"}
    urls = (
        "https://user:${ENV:URLS_PASSWORD}@host/a?x=1&api_key=${ENV:API_KEY}&z=2",
        "http://host:80/a@b?key=${ENV:KEY}",
    )
    assert masked["urls"] == [*urls, "see https://u:v@w"]
    assert resolve_secrets(masked, "x", variables) == config


def test_secrets_that_differ_have_variables_that_differ() -> None:
    def rewards(*keys: str) -> dict[str, Any]:
        a, b, c, d, e, f = keys
        return {
            "rewards": [
                {"function": "my.judge", "name": "a", "arguments": {"api_key": a, "token": [c, d]}},
                {"function": "my.judge", "arguments": {"api_key": b, "token": [c, "${ENV:TOKEN}"]}},
                {"function": "my.judge", "arguments": {"api_key": e, "password": f}},
                {"function": "my.other", "arguments": {"password": f, "url": "${ENV:PASSWORD}"}},
            ]
        }

    config = rewards("1", "2", "3", "4", "5", "6")
    masked, variables = mask_secrets(config)
    names = "A_API_KEY", "JUDGE_API_KEY", "A_TOKEN", "A_TOKEN_2", "JUDGE_API_KEY_2", "JUDGE_PASSWORD"
    expected = rewards(*(f"${{ENV:{name}}}" for name in names))
    expected["rewards"][1]["arguments"]["token"][0] = "${ENV:JUDGE_TOKEN}"
    expected["rewards"][3]["arguments"]["password"] = "${ENV:OTHER_PASSWORD}"
    assert masked == expected
    assert resolve_secrets(masked, "x", variables | {"TOKEN": "${ENV:TOKEN}", "PASSWORD": "${ENV:PASSWORD}"}) == config


def test_resolve_secrets_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE", "abc")
    assert resolve_secrets({"a": ["Bearer ${ENV:JUDGE}", 1], "b": None}, "x") == {"a": ["Bearer abc", 1], "b": None}
    with pytest.raises(ConfigError, match=r"Reward 'judge': the environment variable NOT_SET is not set\. Set it"):
        RewardRunner([RewardFunction(judge, arguments={"api_key": "${ENV:NOT_SET}"})])
    (function,) = RewardRunner([RewardFunction(judge, arguments={"api_key": "${ENV:JUDGE}"})]).functions
    assert function.arguments == {"api_key": "abc"}
    assert "abc" not in repr(RewardFunction(judge, arguments={"api_key": "abc"}))


OWN_CLASSES = """
from lightning.pytorch import Callback
from rlightning.algorithms import SFT

def judge(completion, *, api_key, **others):
    return 1.0

class Own(SFT):
    def __init__(self, model, *, hub_token=None, **kwargs):
        self.save_hyperparameters()
        super().__init__(model, **kwargs)
        self.token = hub_token

class Upload(Callback):
    def __init__(self, url, password=""):
        self.url, self.password = url, password

    def on_fit_start(self, trainer, module):
        found = [function.arguments for function in module.rewarder.functions], module.token, self.url, self.password
        with open("found.txt", "a") as file:
            print(found, file=file)
"""
FOUND = (
    [{"api_key": "sk-abcdef", "digits": "010", "n": 7, "none": "null", "sep": ["a: b", {"x": "1"}], "stop": "###"}],
    "hf-abcdef", "https://me:url-abcdef@host", "pw-abcdef",
)  # fmt: skip


@pytest.mark.long
def test_runs_files_lack_the_secret_and_it_resumes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("logging.raiseExceptions", False)
    (tmp_path / "my_judge.py").write_text(OWN_CLASSES)
    model = {"rewards": [{"function": "my_judge.judge", "arguments": FOUND[0][0]}], "hub_token": FOUND[1]}
    callback = {"class_path": "my_judge.Upload", "init_args": {"url": FOUND[2], "password": FOUND[3]}}
    names = "CSVLogger", "TensorBoardLogger"
    loggers = [{"class_path": name, "init_args": {"save_dir": "run", "name": name}} for name in names]
    (tmp_path / "own.yaml").write_text(
        yaml.safe_dump(
            {
                "model": {
                    "class_path": "my_judge.Own",
                    "init_args": {"model": "model", "prompts_per_step": 4, **model},
                },
                "trainer": {"callbacks": [callback], "logger": loggers},
            }
        )
    )
    folder = tmp_path / "run"
    fit = ["fit", "--trainer.default_root_dir", str(folder), "--trainer.max_steps"]
    assert main([*fit, "1", "--config", "run.yaml", "--config", "own.yaml", "--trainer.max_steps", "1"]) == 0
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {"config.yaml", "report.html", "last.ckpt", "hparams.yaml"} <= {path.name for path in files}
    assert not [path.name for path in files if b"-abcdef" in path.read_bytes()]
    needed = "URL_PASSWORD, PASSWORD, HUB_TOKEN, API_KEY"
    assert f"What goes on from its config.yaml needs them in the environment: {needed}." in caplog.text
    resume = ["--config", str(folder / "config.yaml"), "--trainer.max_steps", "2", "--ckpt_path", "last"]
    for variable in needed.split(", "):
        monkeypatch.delenv(variable, raising=False)
    assert main([*fit, "2", *resume]) == 2
    error = capsys.readouterr().err
    assert "error: trainer.callbacks.0.url: the environment variable URL_PASSWORD is not set. Set it to the" in error
    secrets = ["url-abcdef", "pw-abcdef", "hf-abcdef", "sk-abcdef"]
    for variable, secret in zip(needed.split(", "), secrets, strict=True):
        monkeypatch.setenv(variable, secret)
    assert main([*fit, "2", *resume]) == 0
    assert "step=2" in " ".join(path.name for path in folder.rglob("*.ckpt"))
    assert (tmp_path / "found.txt").read_text() == f"{FOUND}\n" * 2
