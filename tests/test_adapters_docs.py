"""What docs/adapters.md shows can be done as it stands there."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny import save_model

import rlightning.algorithms
from rlightning.models import Adapter, load_config, load_policy, load_tokenizer, save_adapter
from rlightning.models.adapter import resolve_adapter
from rlightning.models.adapter_layers import add_adapter, initialize_adapter

PAGE = (Path(__file__).parents[1] / "docs" / "adapters.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("page") / "model")


def test_the_yaml_goes_with_the_folder_of_its_adapter(model: str, tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    section = yaml.safe_load(block)["model"]
    arguments = section["init_args"] | {"model": model, "lr": float(section["init_args"]["lr"])}
    arguments["adapter"] = Adapter(**arguments["adapter"])
    lora = getattr(rlightning.algorithms, section["class_path"])(**arguments).adapter
    assert (lora.rank, lora.alpha, len(lora.modules)) == (32, 64, 14)
    policy = load_policy(model)
    add_adapter(policy, lora, torch.device("cpu"))
    initialize_adapter(policy, lora)
    save_adapter(policy, lora, model, load_tokenizer(model), tmp_path)
    again = Adapter(**yaml.safe_load(block)["model"]["init_args"]["adapter"], path=tmp_path)
    assert resolve_adapter(again, model, load_config(model)).modules == lora.modules


def test_the_function_makes_a_module(model: str) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    scope: dict[str, Any] = {"__name__": "page"}
    exec(block, scope)
    assert scope["make_module"](model).adapter.rank == 32


def test_settings_in_the_text_are_understood() -> None:
    shown = re.findall(r"`model\.adapter: (\{.*?\})`", PAGE)
    assert shown and all(Adapter(**yaml.safe_load(text)).rank for text in shown)
