"""Adapters: what a user may say of one, PEFT's folders, and the layers that they make of a policy."""

import copy
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import make_batch, refused, save_model
from transformers import AutoModelForCausalLM, GPT2Config, Qwen3MoeConfig

from rlightning.errors import ConfigError
from rlightning.models import Adapter, adapter_files, load_config, load_policy, packed_logprobs
from rlightning.models.adapter import LoRA, resolve_adapter
from rlightning.models.adapter_files import base_digest
from rlightning.models.adapter_layers import (
    adapted_layers,
    adapter_off,
    adapter_parameters,
    add_adapter,
    initialize_adapter,
    merge,
    merged_forward,
    merged_weights,
    perturbed_adapter,
)
from rlightning.parallel.sharding import named_weights

BATCH = make_batch([[[1, 2, 3, 0], [4, 5, 6, 7]], [[7, 8, 9], [1, 1, 0]]])


def resolve(model: str, **kwargs: Any) -> LoRA:
    return resolve_adapter(Adapter(**kwargs), model, load_config(model))


def load_adapted(model: str, lora: LoRA) -> Any:
    policy = load_policy(model)
    add_adapter(policy, lora, torch.device("cpu"))
    initialize_adapter(policy, lora)
    return policy


def logprobs(policy: Any) -> torch.Tensor:
    with torch.no_grad():
        return packed_logprobs(policy, BATCH)[0]


def save_peft(model: str, folder: Path, **kwargs: Any) -> Any:
    """A folder as PEFT writes it, of an adapter that changes something; the model with it."""
    torch.manual_seed(1)
    wrapped = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model), LoraConfig(task_type="CAUSAL_LM", **{"r": 4} | kwargs)
    )
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    wrapped.save_pretrained(str(folder))
    return wrapped


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("adapter") / "model")


def test_defaults_are_rank_32_on_all_linear_layers(model: str) -> None:
    lora = resolve(model)
    assert (lora.rank, lora.alpha, lora.scaling) == (32, 64.0, 2.0)
    assert len(lora.modules) == 14
    assert set(lora.targets) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    # inputs and outputs: q 32 + 64, k and v 32 + 32, o 64 + 32, gate and up 32 + 64, down 64 + 32
    assert lora.num_parameters == 2 * 32 * (96 + 2 * 64 + 96 + 2 * 96 + 96)
    assert math.isclose(resolve(model, rank=16, use_rslora=True).scaling, 32 / 4)


def test_targets_are_ends_of_names(model: str) -> None:
    assert set(resolve(model, target_modules=["q_proj"]).modules) == {
        f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)
    }
    one = resolve(model, target_modules="layers.1.mlp.up_proj")
    assert one.targets == ("model.layers.1.mlp.up_proj",)  # the end alone would stand for both layers'


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"rank": 0}, r"adapter\.rank=0 must be at least 1"),
        ({"alpha": 0.0}, r"adapter\.alpha=0\.0 must be above 0"),
        ({"rank": 100_000}, r"adapter\.rank=100000 is more than the matrices themselves have, at most 32"),
        ({"target_modules": []}, r"adapter\.target_modules names no layers"),
        ({"target_modules": ["q_prj"]}, r"'q_prj' is no module of the model\. Did you mean 'q_proj'\?"),
        ({"target_modules": ["self_attn.q_prj"]}, r"is no module of the model\. Did you mean 'self_attn\.q_proj'\?"),
        ({"target_modules": ["self_atn.q_proj"]}, r"is no module of the model\. Did you mean 'self_attn\.q_proj'\?"),
        (
            {"target_modules": "model.layers.1.self_attn.q_prj"},
            r"is no module of the model\. Did you mean 'model\.layers\.1\.self_attn\.q_proj'\?",
        ),
        (
            {"target_modules": r".*\.(q|v)_proj"},
            r"_proj' is a pattern\. Write a list of names: \[q_proj, v_proj\]",
        ),
        ({"target_modules": "(q"}, r"'\(q' is a pattern\. Write a list of names: \[down_proj, .*, v_proj\]"),
        ({"target_modules": "all_linear"}, r"'all_linear' is no module of the model\. Did you mean 'all-linear'\?"),
        (
            {"target_modules": "q_proj,v_proj"},
            r"'q_proj,v_proj' is one text\. Write a list of names: \[q_proj, v_proj\]",
        ),
        ({"target_modules": ["lm_head"]}, r"'lm_head' is a Linear, no linear layer of the model's blocks"),
        ({"target_modules": ["input_layernorm"]}, r"'input_layernorm' is a Qwen3RMSNorm"),
        ({"path": "nowhere"}, r"adapter\.path='nowhere' has no adapter_config\.json"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(model: str, kwargs: dict[str, Any], message: str) -> None:
    with refused(message):
        resolve(model, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"rank": "4"}, r"adapter\.rank='4' must be a whole number"),
        ({"rank": 2.5}, r"adapter\.rank=2\.5 must be a whole number"),
        ({"rank": True}, r"adapter\.rank=True must be a whole number"),
        ({"alpha": "8"}, r"adapter\.alpha='8' must be a number"),
        ({"alpha": math.nan}, r"adapter\.alpha=nan must be above 0 and finite"),
        ({"target_modules": [1]}, r"adapter\.target_modules=\[1\] must be a name or a list of names"),
        ({"target_modules": 1}, r"adapter\.target_modules=1 must be a name or a list of names"),
        ({"use_rslora": "no"}, r"adapter\.use_rslora='no' must be true or false"),
        ({"path": 1}, r"adapter\.path=1 must be a folder or a name on the hub"),
        ({"quantize_base": "int4"}, r"adapter\.quantize_base='int4' is unknown\. Did you mean 'int8'\?"),
        ({"quantize_base": 4}, r"adapter\.quantize_base='4' is unknown\. Did you mean 'nf4'\?"),
    ],
)
def test_settings_of_another_type_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with refused(message):
        Adapter(**kwargs)


def test_rank_is_limited_by_the_largest_matrix(tmp_path: Path) -> None:
    """Keys and values have 32 rows of 64, queries 64 of 64."""
    model = save_model(tmp_path, hidden_size=64)
    assert resolve(model, rank=64).rank == 64
    with refused(r"adapter\.rank=65 is more than the matrices themselves have, at most 64"):
        resolve(model, rank=65)


def test_all_linear_may_stand_in_a_list(model: str) -> None:
    assert resolve(model, target_modules=["all-linear"]) == resolve(model)


def test_a_model_without_linear_layers_is_refused() -> None:
    """GPT-2 has layers of its own kind, which compute the same."""
    with pytest.raises(ConfigError, match=r"model='gpt2' has no linear layers \(nn\.Linear\) in its blocks"):
        resolve_adapter(Adapter(), "gpt2", GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16))


def test_a_base_is_the_same_in_other_files(model: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(tmp_path / "one")
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(tmp_path / "many", max_shard_size="8KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert base_digest(str(tmp_path / "one")) == base_digest(str(tmp_path / "many"))


def test_folders_dropout_is_left_out_with_a_line(model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_peft(model, tmp_path, lora_dropout=0.1)
    resolve(model, path=tmp_path)
    [line] = [record.getMessage() for record in caplog.records if "lora_dropout" in record.getMessage()]
    assert "has lora_dropout=0.1. It is trained without" in line


def test_experts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 8 experts, for which there are no adapters"):
        resolve_adapter(Adapter(), "moe", Qwen3MoeConfig(num_experts=8))


def test_without_peft_a_line_says_what_to_install(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"needs the package peft .* pip install 'rlightning\[peft\]'"):
        resolve(model)


def test_a_new_adapter_changes_nothing_and_trains_alone(model: str) -> None:
    policy = load_adapted(model, resolve(model, rank=4))
    assert torch.equal(logprobs(policy), logprobs(load_policy(model)))
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in policy.named_parameters() if "lora_" in name}
    base = load_policy(model)
    assert [name for name, _ in named_weights(policy)] == [name for name, _ in named_weights(base)]


def test_first_values_do_not_depend_on_the_default_device(model: str) -> None:
    lora = resolve(model, rank=4)
    torch.manual_seed(0)
    expected = dict(adapter_parameters(load_adapted(model, lora)))
    policy = load_policy(model)
    add_adapter(policy, lora, torch.device("cpu"))
    torch.manual_seed(0)
    with torch.device("meta"):
        initialize_adapter(policy, lora)
    assert all(torch.equal(weight, expected[name]) for name, weight in adapter_parameters(policy))


def test_first_values_are_distributed_as_in_peft(model: str) -> None:
    """Uniformly between -1 / sqrt(inputs) and 1 / sqrt(inputs), which is ``kaiming_uniform_`` with ``a = sqrt(5)``."""
    torch.manual_seed(0)
    theirs = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model), LoraConfig(r=32, target_modules="all-linear")
    ).state_dict()
    for name, weight in adapter_parameters(load_adapted(model, resolve(model, rank=32))):
        expected = theirs[name.replace(".weight", ".default.weight")]
        if ".lora_B." in name:
            assert not weight.any() and not expected.any()
            continue
        assert expected.abs().max() <= weight.shape[1] ** -0.5
        for summary in (torch.min, torch.max, torch.var):
            got, own = summary(weight.detach()).item(), summary(expected).item()
            assert got == pytest.approx(own, rel=0.02 if summary is not torch.var else 0.2), (name, summary)


@pytest.mark.parametrize("kwargs", [{"lora_alpha": 6}, {"lora_alpha": 6, "use_rslora": True}])
def test_a_folder_of_pefts_computes_as_in_peft(model: str, tmp_path: Path, kwargs: dict[str, Any]) -> None:
    theirs = save_peft(model, tmp_path, target_modules=["q_proj", "down_proj"], **kwargs)
    ours = load_adapted(model, resolve(model, path=tmp_path))
    ids = torch.tensor([[1, 2, 5, 4, 3]])
    bounds = torch.tensor([0, 5], dtype=torch.int32)
    with torch.no_grad():
        got = ours(ids, use_cache=False, cu_seq_lens_q=bounds, max_length_q=5).logits
        torch.testing.assert_close(got, theirs(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.long
def test_merged_weights_and_forward_equal_adapted_models(model: str, tmp_path: Path) -> None:
    save_peft(model, tmp_path / "adapter", target_modules="all-linear")
    policy = load_adapted(model, resolve(model, path=tmp_path / "adapter"))
    with_adapter, base = logprobs(policy), logprobs(load_policy(model))
    assert (with_adapter - base).abs().max() > 0.1
    merged = load_policy(model)
    merged.load_state_dict(dict(merged_weights(policy)), strict=False)
    torch.testing.assert_close(logprobs(merged), with_adapter, atol=1e-4, rtol=1e-4)
    with merged_forward(policy):
        torch.testing.assert_close(logprobs(policy), logprobs(merged), atol=1e-6, rtol=1e-6)
    assert torch.equal(logprobs(policy), with_adapter)
    with torch.no_grad(), adapter_off(policy):
        assert torch.equal(logprobs(policy), base)
    assert all(weight.requires_grad for _, weight in adapter_parameters(policy))
    copied = copy.deepcopy(policy)
    with adapter_off(copied):
        assert torch.equal(logprobs(copied), base) and torch.equal(logprobs(policy), with_adapter)


def test_merged_weights_are_rounded_once_under_autocast(model: str, tmp_path: Path) -> None:
    save_peft(model, tmp_path / "adapter", target_modules=["q_proj"])
    policy = load_adapted(model, resolve(model, path=tmp_path / "adapter"))
    layer = next(iter(adapted_layers(policy).values()))
    expected = merge(layer)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(merge(layer), expected)
        with merged_forward(policy):
            got = layer(torch.eye(expected.shape[1]))
    assert torch.equal(got, expected.bfloat16().T)


def test_adapter_computes_in_dtype_of_inputs_under_autocast(model: str) -> None:
    """PEFT would first make a copy of the inputs in the dtype of its weights, which autocast rounds again."""
    layer = next(iter(adapted_layers(load_adapted(model, resolve(model))).values()))
    dtypes: list[torch.dtype] = []
    layer.lora_A["default"].register_forward_pre_hook(lambda _, inputs: dtypes.append(inputs[0].dtype))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        layer(torch.ones(1, 32, dtype=torch.bfloat16))
    assert dtypes == [torch.bfloat16]


def test_perturbed_adapter_has_fifth_of_bases_norm(model: str) -> None:
    policy = load_adapted(model, resolve(model))
    before = {name: weight.clone() for name, weight in adapter_parameters(policy)}
    with perturbed_adapter(policy), torch.no_grad():
        for layer in adapted_layers(policy).values():
            added: Any = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]
            assert 0.15 < added.norm() / layer.base_layer.weight.norm() < 0.25
    assert all(torch.equal(weight, before[name]) for name, weight in adapter_parameters(policy))


def test_another_bases_adapter_is_refused(model: str, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", hidden_size=64)
    save_peft(other, tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    with pytest.raises(ConfigError, match=r"is an adapter of '.*other', and model='.*model' is another base"):
        resolve(model, path=tmp_path / "adapter")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": None}))
    with pytest.raises(
        ConfigError, match=r"another base than model=.*lora_A\.weight' is \[4, 64\], should be \[4, 32\]"
    ):
        resolve(model, path=tmp_path / "adapter")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"use_dora": True}, "has use_dora=True, which is not trained here"),
        ({"bias": "lora_only"}, "has bias=lora_only"),
        ({"rank_pattern": {"q_proj": 2}}, "has rank_pattern="),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save="),
        ({"init_lora_weights": "pissa"}, r"has init_lora_weights='pissa', by which its base has other values"),
        ({"init_lora_weights": "pissa_niter_16"}, r"has init_lora_weights='pissa_niter_16', by which"),
        ({"init_lora_weights": "olora"}, r"has init_lora_weights='olora', by which its base has other values"),
    ],
)
def test_other_kinds_of_adapters_are_refused(model: str, tmp_path: Path, kwargs: dict[str, Any], message: str) -> None:
    LoraConfig(target_modules=["q_proj"], base_model_name_or_path=model, **kwargs).save_pretrained(str(tmp_path))
    with pytest.raises(ConfigError, match=message):
        resolve(model, path=tmp_path)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"rank": 8}, r"adapter\.rank=8, but adapter\.path=.* has 4\. Leave adapter\.rank out"),
        ({"alpha": 3.0}, r"adapter\.alpha=3\.0, but adapter\.path=.* has 8\. Leave adapter\.alpha out"),
        ({"use_rslora": True}, r"adapter\.use_rslora=True, but adapter\.path=.* has False\."),
        ({"target_modules": ["o_proj"]}, r"adapter\.target_modules"),
        ({"target_modules": "all-linear"}, r"adapter\.target_modules"),
    ],
)
def test_a_folders_own_settings_are_not_overridden(
    model: str, tmp_path: Path, kwargs: dict[str, Any], message: str
) -> None:
    save_peft(model, tmp_path, target_modules=["q_proj", "v_proj"])
    with pytest.raises(ConfigError, match=message):
        resolve(model, path=tmp_path, **kwargs)


def test_a_folders_settings_may_be_repeated(model: str, tmp_path: Path) -> None:
    save_peft(model, tmp_path, use_rslora=True)
    assert resolve(model, path=tmp_path, rank=4, alpha=8.0, use_rslora=True) == resolve(model, path=tmp_path)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_folder_with_weight_that_is_not_finite_is_refused(model: str, tmp_path: Path, value: float) -> None:
    save_peft(model, tmp_path, target_modules=["q_proj"])
    weights = load_file(tmp_path / "adapter_model.safetensors")
    broken = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    weights[broken][2, 3] = value
    save_file(weights, tmp_path / "adapter_model.safetensors")
    with refused(rf"has a weight that is NaN or infinite, '{re.escape(broken)}'"):
        load_adapted(model, resolve(model, path=tmp_path))


def test_targets_beside_a_folder_are_those_of_its_adapter(model: str, tmp_path: Path) -> None:
    save_peft(model, tmp_path, target_modules=["q_proj", "v_proj"])
    alone = resolve(model, path=tmp_path)
    assert resolve(model, path=tmp_path, target_modules=["self_attn.v_proj", "q_proj"]) == alone
    with refused(
        r"is not that of adapter\.path=.*: it names k_proj, which it does not adapt and lacks v_proj, which it"
    ):
        resolve(model, path=tmp_path, target_modules=["q_proj", "k_proj"])
    with refused(r"it names down_proj, gate_proj, k_proj, o_proj and 1 more, which it does not adapt\. Leave"):
        resolve(model, path=tmp_path, target_modules="all-linear")


@pytest.mark.parametrize("targets", [["lm_head"], ["q_proj", "lm_head"]])
def test_adapter_of_layer_outside_blocks_is_refused(model: str, tmp_path: Path, targets: list[str]) -> None:
    save_peft(model, tmp_path, target_modules=targets)
    with refused(r"adapts 'lm_head', outside of the model's blocks.* without 'lm_head' in target_modules"):
        resolve(model, path=tmp_path)


def test_a_path_may_be_a_name_on_the_hub(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_peft(model, tmp_path)

    def download(name: str, file: str) -> str:
        if name != "someone/adapter":
            raise LocalEntryNotFoundError("the hub cannot be reached")
        return str(tmp_path / file)

    monkeypatch.setattr(adapter_files, "hf_hub_download", download)
    assert resolve(model, path="someone/adapter") == resolve(model, path=tmp_path)
    with refused(r"adapter\.path='someone/other' is no folder, and no adapter .* the hub: .* Name a folder that PEFT"):
        resolve(model, path="someone/other")


def test_mistyped_folder_is_not_looked_up_on_the_hub(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(name: str, file: str) -> str:
        raise AssertionError("the hub is asked")

    monkeypatch.setattr(adapter_files, "hf_hub_download", download)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with refused(r"adapter\.path='runs/adapter' is no folder, .* since 'runs' is a folder here\. Name a folder that"):
        resolve(model, path="runs/adapter")


def test_adapter_folder_without_safetensors_is_refused(model: str, tmp_path: Path) -> None:
    save_peft(model, tmp_path)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with refused(r"has its weights in adapter_model\.bin.* save_pretrained\(folder, safe_serialization=True\)"):
        resolve(model, path=tmp_path)
