import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import change_config, refused
from tiny_models import packed_inputs, save_tiny, tiny_config
from transformers import AutoConfig, AutoModelForCausalLM

from rlightning.errors import ConfigError
from rlightning.models import describe_length_limit, load_config, load_policy, max_model_length
from rlightning.models.architecture import build_small, check_policy


@pytest.mark.parametrize(
    ("kind", "config", "reason"),
    [
        ("gemma2", {}, "caps attention scores"),
        ("gpt_oss", {}, "adds to plain dot products"),
        ("mamba", {}, "layers of the type 'linear_attention'"),
        ("qwen3_next", {}, "layers of the type 'linear_attention'"),
        ("recurrent_gemma", {}, "recurrent state"),
        ("lfm2", {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}, "layers of the type 'conv'"),
        ("llama4_text", {}, "layers of the type 'chunked_attention'"),
        ("stablelm", {}, "takes no attention function"),
        ("bloom", {}, "adds to plain dot products"),
        ("granite", {"logits_scaling": 8.0}, "its config has logits_scaling"),
        ("cohere", {}, "its config has logit_scale"),
        ("phimoe", {}, r"its router draws random numbers \(router_jitter_noise=0\.01\)"),
        ("t5", {}, "is no causal language model"),
    ],
)
def test_the_config_alone_tells(kind: str, config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    AutoConfig.for_model(kind, **config).save_pretrained(tmp_path)
    with refused(rf"\({kind}\) .*{reason}.* Choose a model"):
        load_config(str(tmp_path))


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    ],
)
def test_a_quantized_model_is_refused_in_a_line(quantization: dict[str, Any], tmp_path: Path) -> None:
    folder = save_tiny("qwen3", tmp_path, head_dim=8)
    change_config(folder, quantization_config=quantization)
    method = quantization["quant_method"]
    with refused(rf"is quantized .*'{method}'.*Use the unquantized model"):
        load_config(folder)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gemma4_text", "qwen3_moe"])
def test_small_architecture_takes_layers_that_differ(kind: str) -> None:
    """A head has 256 numbers in one of Gemma 4's layers and 512 in the other."""
    check_policy(kind, build_small(tiny_config(kind)))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("phi", "its output layer has a bias"),
        ("nemotron", "does not tell attention where a sequence ends"),
        pytest.param("longcat_flash", "it fails on them with RuntimeError: The size of", marks=pytest.mark.long),
    ],
)
def test_a_trial_run_tells_the_rest(kind: str, reason: str, tmp_path: Path) -> None:
    folder = save_tiny(kind, tmp_path)
    with pytest.raises(ConfigError, match=reason):
        load_policy(folder)


def test_attention_across_packed_sequences_is_detected(tmp_path: Path) -> None:
    folder = save_tiny("qwen3", tmp_path, head_dim=8)
    leaking = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    leaking.config.use_cache = False
    check_policy("leaking", load_policy(folder))
    with pytest.raises(ConfigError, match="depends on the one packed before it"):
        check_policy("leaking", NoBounds(leaking))  # type: ignore[arg-type]


def test_a_policy_is_checked_without_tf32(tmp_path: Path) -> None:
    """A bfloat16 run allows it, and a deep model's rounding then looks like another result."""
    policy = load_policy(save_tiny("qwen3", tmp_path, head_dim=8))
    seen = set[str]()
    policy.register_forward_hook(lambda *_: seen.add(torch.get_float32_matmul_precision()))
    torch.set_float32_matmul_precision("high")
    try:
        check_policy("checked", policy)
        assert (seen, torch.get_float32_matmul_precision()) == ({"highest"}, "high")
    finally:
        torch.set_float32_matmul_precision("highest")


class NoBounds(torch.nn.Module):
    """A model that lets every token see all before it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config, self.dtype, self.device = model, model.config, model.dtype, model.device
        self.base_model = self

    def get_output_embeddings(self) -> Any:
        return self.model.get_output_embeddings()

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        output = self.model(input_ids, output_hidden_states=True)
        output.last_hidden_state = output.hidden_states[-1]
        return output


def test_a_head_that_does_more_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy: Any = load_policy(save_tiny("qwen3", tmp_path, head_dim=8))
    head = policy.get_output_embeddings()
    monkeypatch.setattr(head, "forward", lambda hidden: 2 * hidden @ head.weight.T)
    with pytest.raises(ConfigError, match="its logits are not its output layer times its last hidden states"):
        check_policy("scaled", policy)


def test_what_is_no_config_is_said_in_a_line(tmp_path: Path) -> None:
    for text in ("{", "{}", '{"model_type": "nope"}', json.dumps({"model_type": "qwen3", "hidden_size": "x"})):
        (tmp_path / "config.json").write_text(text)
        with refused(r"has no readable config\.json: "):
            load_config(str(tmp_path))


LONGROPE: dict[str, Any] = {
    "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
    "original_max_position_embeddings": 16,
}


def test_longrope_takes_sequences_to_its_original_length() -> None:
    config = tiny_config("phi3", **LONGROPE)
    assert config.max_position_embeddings == 64
    assert max_model_length(config) == 16
    assert describe_length_limit(config).startswith("beyond, its longrope frequencies are others")
    plain = tiny_config("phi3")
    assert (max_model_length(plain), describe_length_limit(plain)) == (64, "")


def test_longrope_sequence_is_same_in_any_allowed_pack(tmp_path: Path) -> None:
    policy = load_policy(save_tiny("phi3", tmp_path, **LONGROPE))
    first, second, long = (torch.arange(3, 3 + length) for length in (5, 16, 17))
    alone, packed, beside_longer = (
        policy(**packed_inputs([first, *others])).logits[0, :5] for others in ([], [second], [long])
    )
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)
    assert (beside_longer - alone).abs().max() > 0.1  # why 17 tokens are refused
