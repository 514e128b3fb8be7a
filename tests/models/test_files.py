"""What a model's files tell, against its config.json."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import save_model
from tiny_models import save_tiny

from rlightning.algorithms import SFT
from rlightning.errors import ConfigError
from rlightning.models import load_config, load_policy
from rlightning.models.files import check_head, find_weights, stored_dtype


def save_with_head(folder: Path, scale: float, **config: Any) -> str:
    """A model whose config.json says that its output layer is the embedding, with one ``scale`` times as large."""
    save_model(folder, **config)
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"] = scale * weights["model.embed_tokens.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stored_dtype_is_that_of_the_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_tiny("qwen3", tmp_path, dtype, head_dim=8)
    assert stored_dtype(find_weights(folder)) == dtype


def test_stored_dtype_is_that_of_most_numbers(tmp_path: Path) -> None:
    weights = {"router": torch.zeros(3), "matrix": torch.zeros(2, 2, dtype=torch.bfloat16), "ids": torch.arange(9)}
    save_file(weights, tmp_path / "model.safetensors")
    assert stored_dtype(find_weights(str(tmp_path))) == torch.bfloat16
    save_file({"ids": torch.arange(9)}, tmp_path / "model.safetensors")
    assert stored_dtype(find_weights(str(tmp_path))) is None


def test_an_output_layer_of_its_own_under_a_tied_config_is_refused(tmp_path: Path) -> None:
    folder = save_with_head(tmp_path, 2.0)
    message = r"tie_word_embeddings=true in config\.json, but its files hold 'lm_head\.weight'.*Write tie_word_emb"
    with pytest.raises(ConfigError, match=message) as error:
        SFT(folder)  # before weights are loaded or an engine starts
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="tie_word_embeddings=true"):
        load_policy(folder)


def test_an_output_layer_of_its_own_is_trained_where_the_config_says_so(tmp_path: Path) -> None:
    folder = save_with_head(tmp_path, 2.0, tie_word_embeddings=False)
    check_head(folder, load_config(folder), find_weights(folder))
    weights = dict(load_policy(folder).named_parameters())
    assert torch.equal(weights["lm_head.weight"], 2 * weights["model.embed_tokens.weight"])


def test_a_copy_of_the_embedding_is_the_embedding(tmp_path: Path) -> None:
    folder = save_with_head(tmp_path, 1.0)
    module = SFT(folder)
    module.configure_model()
    assert "lm_head.weight" not in dict(module.named_weights())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_export_has_the_dtype_of_the_weights_not_of_the_config(dtype: str, tmp_path: Path) -> None:
    folder = Path(save_model(tmp_path / "model"))
    path = folder / "model.safetensors"
    weights = {name: weight.to(getattr(torch, dtype)) for name, weight in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    other = {"bfloat16": {}, "float32": {"dtype": "bfloat16"}}[dtype]  # no key, and a wrong one
    (folder / "config.json").write_text(json.dumps({**config, "dtype": None} | other))
    module = SFT(str(folder))
    module.configure_model()
    module.save_hf(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert {str(weight.dtype) for weight in saved.values()} == {f"torch.{dtype}"}
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == dtype
