"""Sizes of architectures whose config.json calls them something else, or leaves them out."""

from typing import Any

import pytest
from tiny_models import tiny_config
from transformers import AutoConfig

from rlightning.models.counts import (
    cached_numbers,
    head_size,
    inner_size,
    num_active_experts,
    num_experts,
    num_key_value_heads,
)
from rlightning.rollout.engine_memory import read_engine


@pytest.mark.parametrize(
    ("kind", "config", "inner", "head", "key_value_heads"),
    [
        ("qwen3", {"head_dim": 16}, 64, 16, 2),
        ("gpt2", {}, 4 * 32, 8, 4),  # n_inner is None
        ("gpt2", {"n_inner": 96}, 96, 8, 4),
        ("gpt_bigcode", {"n_inner": 96}, 96, 8, 1),  # one for all query heads
        ("opt", {"ffn_dim": 48}, 48, 8, 4),
        ("dbrx", {"ffn_config": {"ffn_hidden_size": 80}}, 80, 8, 1),
        ("gemma3n_text", {"intermediate_size": [64, 128], "num_hidden_layers": 2, "head_dim": 16}, 128, 16, 2),
        ("phi3", {}, 64, 8, 2),
    ],
)
def test_sizes_have_one_name(kind: str, config: dict[str, Any], inner: int, head: int, key_value_heads: int) -> None:
    made = tiny_config(kind, **config)
    assert (inner_size(made), head_size(made), num_key_value_heads(made)) == (inner, head, key_value_heads)


@pytest.mark.parametrize(("kind", "numbers"), [("qwen2", [2 * 2 * 8, 2 * 8, 2 * 8]), ("deepseek_v3", [64, 64, 64])])
def test_rank_caches_own_heads_or_whole_latent_vector(kind: str, numbers: list[int]) -> None:
    """Of two key/value heads of 8, or of 32 latent numbers and 32 with positions."""
    assert [cached_numbers(tiny_config(kind), size) for size in (1, 2, 4)] == numbers


def test_layers_with_own_heads_count_by_largest() -> None:
    """Gemma 4's layers that see all tokens have heads of another size."""
    config = AutoConfig.for_model("gemma4_text")
    sizes = {layer.head_dim for layer in config.per_layer_config}
    assert len(sizes) > 1 and head_size(config) == max(sizes)


@pytest.mark.parametrize(
    ("kind", "config", "number", "active"),
    [
        ("qwen3", {}, 0, 0),
        ("qwen3_moe", {}, 4, 2),
        ("mixtral", {}, 4, 2),
        ("glm4_moe", {}, 4, 2),
        ("ernie4_5_moe", {}, 4, 2),
        ("dbrx", {"ffn_config": {"moe_num_experts": 8, "moe_top_k": 3}}, 8, 3),
    ],
)
def test_experts_are_counted_under_every_name(kind: str, config: dict[str, Any], number: int, active: int) -> None:
    made = tiny_config(kind, **config)
    assert (num_experts(made), num_active_experts(made)) == (number, active)


def test_tiny_models_write_what_transformers_writes() -> None:
    assert not hasattr(tiny_config("gpt2"), "intermediate_size")
    with pytest.raises(TypeError, match="GPT2Config knows no intermediate_size"):
        tiny_config("gpt2", intermediate_size=64)


def test_an_engine_of_gpt2_is_planned() -> None:
    arguments = {"max_model_len": 32, "max_num_seqs": 2, "max_num_batched_tokens": 16, "dtype": "bfloat16"}
    engine = read_engine(tiny_config("gpt2"), arguments)
    # 3 hidden states, 4 heads with keys and values of 8, and 3 of 4 x 32 inner; the sampler's three [2, 40] float32
    assert engine.activations == 2 * 16 * (3 * 32 + 12 * 8 + 3 * 128) + 3 * 4 * 2 * 40
    assert engine.token == 2 * 2 * 4 * 8 * 2  # keys and values of 2 layers
