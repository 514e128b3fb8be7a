"""Models with Python code of their own: refused in a line wherever they are loaded, or trusted everywhere."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_project import make_project
from engine_run import Witness, make_data, make_module, make_rollout, make_trainer, save_model

from rlightning.__main__ import main
from rlightning.errors import ConfigError
from rlightning.models import load_config, load_policy, load_tokenizer
from rlightning.rollout.model_files import ModelFiles

CONFIGURATION = """\
from transformers import Qwen3Config


class OwnConfig(Qwen3Config):
    model_type = "own_{name}"
"""
MODELING = """\
from transformers import Qwen3ForCausalLM

from .configuration_own import OwnConfig


class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig
"""
TOKENIZATION = """\
from transformers import PreTrainedTokenizerFast


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
IN_CONFIG = r"brings Python code of its own \(auto_map in its config\.json\), which would run here\. Set "
IN_TOKENIZER = IN_CONFIG.replace("config", "tokenizer_config")


@pytest.fixture(autouse=True)
def nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal at which a question would count as yes."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def bring_code(folder: Path, name: str) -> str:
    """Give a model's folder code of its own, and what transformers knows no class for."""
    own = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    change(folder / "config.json", model_type=f"own_{name}", auto_map=own)
    (folder / "configuration_own.py").write_text(CONFIGURATION.format(name=name))
    (folder / "modeling_own.py").write_text(MODELING)
    return str(folder)


def bring_tokenizer(folder: Path) -> str:
    own = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    change(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=own)
    (folder / "tokenization_own.py").write_text(TOKENIZATION)
    return str(folder)


def test_code_is_refused_wherever_a_model_is_loaded(tmp_path: Path) -> None:
    before = set(sys.modules)
    model = bring_code(Path(save_model(tmp_path / "model")), "refused")
    for load in (load_config, load_policy, ModelFiles.read, make_module):
        with pytest.raises(ConfigError, match=rf"^model='{model}' {IN_CONFIG}model\.trust_remote_code: true if you"):
            load(model)
    with pytest.raises(ConfigError, match=IN_CONFIG):
        make_module(save_model(tmp_path / "plain"), reference_model=model, kl_coef=0.1)
    with pytest.raises(ConfigError, match=IN_TOKENIZER):
        load_tokenizer(bring_tokenizer(Path(model)))
    loaded = sys.modules.keys() - before
    assert not [name for name in loaded if "configuration_own" in name or "tokenization_own" in name]


@pytest.mark.long
@pytest.mark.parametrize("command", ["fit", "plan", "serve"])
def test_commands_refuse_code_in_a_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_project(tmp_path)
    bring_code(tmp_path / "model", command)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    memory = ["--device-memory", "80GB"] if command == "plan" else []
    assert main([command, "--config", "run.yaml", *memory]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: model='model' brings Python code of its own")


@pytest.mark.processes
def test_trusted_code_runs_in_trainer_and_engine(tmp_path: Path) -> None:
    folder = Path(save_model(tmp_path / "model"))
    model = bring_tokenizer(Path(bring_code(folder, "trusted")))
    module = make_module(model, trust_remote_code=True, kl_coef=0.1)
    assert type(module.model_config).__name__ == "OwnConfig" and type(module.tokenizer).__name__ == "OwnTokenizer"
    witness = Witness()
    trainer = make_trainer(tmp_path, 2, make_rollout(), witness)
    trainer.fit(module, make_data(tmp_path))
    assert type(module.loaded_actor).__name__ == "OwnForCausalLM"
    assert [event for event in witness.events if "sync" in event] == ["sync 0", "sync 1"]
    assert all(torch.isfinite(parameter).all() for parameter in module.loaded_actor.parameters())
