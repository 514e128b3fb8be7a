"""Checks of a model's files against its config.json."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import change_config, refused, save_model
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


def test_own_output_layer_under_tied_config_is_refused(tmp_path: Path) -> None:
    folder = save_with_head(tmp_path, 2.0)
    message = r"tie_word_embeddings=true in config\.json, but its files hold 'lm_head\.weight'.*Write tie_word_emb"
    with refused(message):
        SFT(folder)  # before weights are loaded or an engine starts
    with pytest.raises(ConfigError, match="tie_word_embeddings=true"):
        load_policy(folder)


def test_own_output_layer_is_trained_if_config_agrees(tmp_path: Path) -> None:
    folder = save_with_head(tmp_path, 2.0, tie_word_embeddings=False)
    check_head(folder, load_config(folder), find_weights(folder))
    weights = dict(load_policy(folder).named_parameters())
    assert torch.equal(weights["lm_head.weight"], 2 * weights["model.embed_tokens.weight"])


def test_a_copy_of_the_embedding_is_the_embedding(tmp_path: Path) -> None:
    folder = save_with_head(tmp_path, 1.0)
    module = SFT(folder)
    module.configure_model()
    assert "lm_head.weight" not in dict(module.named_weights())


def save_as_bin(folder: Path) -> None:
    """Write the folder's weights in PyTorch's format instead."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def save_as_several(folder: Path) -> None:
    """Write the folder's weights as two files and an index instead."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    files = {name: f"{int(number > 5)}.safetensors" for number, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: weights[name] for name in names if files[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


@pytest.mark.parametrize("convert", [None, save_as_bin, save_as_several])
def test_missing_output_layer_is_refused_before_loading(convert: Any, tmp_path: Path) -> None:
    save_model(tmp_path)
    change_config(tmp_path, tie_word_embeddings=False)
    if convert:
        convert(tmp_path)
    with refused(r"=false in config\.json, but its files hold no 'lm_head\.weight'\. Use"):
        SFT(str(tmp_path))


def test_bin_with_own_output_layer_is_refused(tmp_path: Path) -> None:
    save_with_head(tmp_path, 2.0)
    save_as_bin(tmp_path)
    module = SFT(str(tmp_path))
    message = r"hold 'lm_head\.weight' with other values than 'model\.embed_tokens\.weight'"
    with pytest.raises(ConfigError, match=message):
        module.configure_model()


@pytest.mark.parametrize("convert", [None, save_as_bin, save_as_several])
def test_layers_beyond_the_configs_are_counted(convert: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_model(tmp_path, num_hidden_layers=4)
    if convert:
        convert(tmp_path)
    SFT(str(tmp_path))
    assert "layers" not in caplog.text
    change_config(tmp_path, num_hidden_layers=3, layer_types=["full_attention"] * 3, max_window_layers=3)
    SFT(str(tmp_path))
    assert "stores 4 layers, and config.json's num_hidden_layers=3 uses the first 3 of them; the other 1" in caplog.text
    assert "multi-token prediction" in caplog.text


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", r"model\.safetensors\.index\.json is no JSON: Expecting property name"),
        ("{}", r'model\.safetensors\.index\.json has no "weight_map"'),
        ("[]", r'index\.json has no "weight_map"'),
        ('{"weight_map": {}}', r'index\.json has no "weight_map"'),
        ('{"weight_map": {"lm_head.weight": 3}}', r'index\.json has no "weight_map"'),
        ('{"weight_map": {"a": "1.safetensors"}}', r"lacks 1 of its 1 files of weights, such as '1\.safetensors'"),
    ],
)
def test_index_that_is_none_is_one_line(index: str, message: str, tmp_path: Path) -> None:
    save_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with refused(message):
        SFT(str(tmp_path))


def test_a_single_file_counts_before_an_index(tmp_path: Path) -> None:
    save_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "absent.safetensors"}}')
    assert set(find_weights(str(tmp_path)).values()) == {tmp_path / "model.safetensors"}
    load_policy(str(tmp_path))  # as transformers does


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"vocab_size": 41},
            r"stores 'lm_head\.weight' with the shape \[40, 32\], .* makes it \[41, 32\]",
        ),
        ({"num_attention_heads": 2}, r"stores 'model\.layers\.0\.self_attn\.o_proj\.weight' with the shape \[32, 32\]"),
        ({"hidden_act": "nope"}, r"cannot be built from its config\.json: KeyError: 'nope'"),
        ({"num_attention_heads": 0}, r"cannot be built from its config\.json: ZeroDivisionError"),
        ({"rope_parameters": {"rope_type": "nope", "rope_theta": 1e4}}, r"from its config\.json: KeyError: 'nope'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, r"no readable config\.json: .*Missing required keys.*'factor'"),
    ],
)
def test_config_that_does_not_fit_is_one_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save_tiny("qwen3", tmp_path, head_dim=8, tie_word_embeddings=False)
    change_config(folder, **change)
    with refused(message):
        load_policy(folder)


@pytest.mark.parametrize(
    ("value", "name"), [(float("nan"), "model.norm.weight"), (float("inf"), "model.layers.1.mlp.up_proj.weight")]
)
def test_weights_that_are_not_finite_are_named(value: float, name: str, tmp_path: Path) -> None:
    folder = save_tiny("qwen3", tmp_path, head_dim=8)
    weights = load_file(tmp_path / "model.safetensors")
    weights[name].view(-1)[3] = value
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"has NaN or infinite values in 1 of its weights, such as '{name}'"):
        load_policy(folder)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_export_has_weights_dtype_not_configs(dtype: str, tmp_path: Path) -> None:
    folder = Path(save_model(tmp_path / "model"))
    path = folder / "model.safetensors"
    weights = {name: weight.to(getattr(torch, dtype)) for name, weight in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    change_config(folder, dtype={"bfloat16": None, "float32": "bfloat16"}[dtype])  # none, and a wrong one
    module = SFT(str(folder))
    module.configure_model()
    module.save_hf(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert {str(weight.dtype) for weight in saved.values()} == {f"torch.{dtype}"}
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == dtype
