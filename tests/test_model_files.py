"""The files that engines read again, and whether they are still those that the run began with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import save_model

from rlightning.algorithms import GRPO
from rlightning.errors import EngineError
from rlightning.model_files import ModelFiles
from rlightning.rollout import Sampling
from rlightning.rollout.engine_options import EngineOptions
from rlightning.rollout.vllm_engine import VLLMEngine


def test_changes_are_those_of_what_an_engine_reads(tmp_path: Path) -> None:
    model = save_model(tmp_path)
    files = ModelFiles.read(model)
    assert {"config.json", "tokenizer.json", "generation_config.json"} <= files.digests.keys()
    assert "model.safetensors" not in files.digests, "weights come from the trainer"
    (tmp_path / "README.md").write_text("read by people")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert files.find_changes() == []
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert files.find_changes() == ["chat_template.jinja", "generation_config.json", "tokenizer.json"]


def test_hub_model_is_of_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "models--org--tiny"
    for commit, text in {"aaa": "one", "bbb": "two"}.items():
        (cache / "snapshots" / commit).mkdir(parents=True)
        for name in ("config.json", "tokenizer.json"):
            (cache / "snapshots" / commit / name).write_text(text)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("aaa")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    files = ModelFiles.read("org/tiny")
    assert files.revision == "aaa" and set(files.digests) == {"config.json", "tokenizer.json"}
    (cache / "snapshots" / "aaa" / "generation_config.json").write_text("downloaded later")
    assert files.find_changes() == []
    (cache / "refs" / "main").write_text("bbb")
    assert files.find_changes() == [], "engines are told the commit"
    (cache / "refs" / "main").write_text("aaa")
    (cache / "snapshots" / "aaa" / "tokenizer.json").write_text("edited")
    assert files.find_changes() == ["tokenizer.json"]
    assert ModelFiles.read("org/none").digests == ModelFiles.read("no name: at all").digests == {}


async def reward(completion: str) -> float:
    return 1.0


def configure(module: Any, folder: Path) -> Any:
    (config,) = EngineOptions().configure(module, torch.device("cpu"), Sampling(), 8, folder)
    return config


def test_engine_is_not_started_on_other_files(tmp_path: Path) -> None:
    module = GRPO(save_model(tmp_path / "model"), rewards=[reward])
    config = configure(module, tmp_path)
    settings = tmp_path / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token": "="}))
    engine = VLLMEngine(config)
    with pytest.raises(EngineError) as caught:
        engine.start()
    assert str(caught.value) == (
        f"The engine is not started: tokenizer_config.json of the model '{tmp_path / 'model'}' changed after the run "
        "began, and an engine would read what is there now. Restore what was there, and resume the run from its last "
        "checkpoint."
    )
    assert engine.process is None
    assert configure(module, tmp_path).model_files == config.model_files, "of the module's beginning"
