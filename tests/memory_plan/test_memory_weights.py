"""Weights are counted exactly."""

import pytest
from planned import MIDDLE, SMALL
from tiny_models import SIZES, tiny_config
from transformers import AutoModelForCausalLM, Qwen3Config

from rlightning.models.counts import count_weights


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "mistral", "phi3"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_every_weight_is_counted_once(kind: str, is_tied: bool) -> None:
    config = tiny_config(kind, tie_word_embeddings=is_tied)
    model = AutoModelForCausalLM.from_config(config)
    weights = count_weights(config)
    assert weights.total == weights.held == sum(parameter.numel() for parameter in model.parameters())
    assert weights.is_tied == is_tied
    assert weights.layers + weights.root == weights.total
    assert weights.layer == sum(parameter.numel() for parameter in model.model.layers[0].parameters())


def test_weights_count_to_the_published_sizes() -> None:
    assert count_weights(SMALL).total == 596_049_920
    assert count_weights(MIDDLE).total == 1_720_574_976


def test_a_rank_holds_its_part() -> None:
    config = Qwen3Config(**SIZES | {"head_dim": 8}, tie_word_embeddings=True)
    # E=32, 4 heads and 2 key/value heads of 8, feed-forward 64, vocabulary 40
    matrices = 32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 64 * 32
    norms, head_norms = 2 * 32, 2 * 8
    root = 40 * 32 + 32
    assert count_weights(config).total == 2 * (matrices + norms + head_norms) + root
    halves = count_weights(config, tensor_parallel_size=2)
    assert halves.layer == matrices // 2 + norms + head_norms
    assert (halves.head, halves.root) == (20 * 32, 20 * 32 + 32)
    assert halves.held == 2 * halves.layer + halves.root
    shards = count_weights(config, tensor_parallel_size=2, shard_size=3)
    # rows of each tensor, thirds rounded up: queries 16 of 32, keys and values 8 of 16, output 32 of 32 by 16 columns,
    # vocabulary 20 of 40
    rows = 6 * 32 + 2 * 3 * 32 + 11 * 16 + 2 * 11 * 32 + 11 * 32
    assert shards.held == 2 * (rows + 2 * 11 + 2 * 3) + 7 * 32 + 11
