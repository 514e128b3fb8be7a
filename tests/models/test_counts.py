"""Counted operations against those that torch counts while a tiny model runs forward and backward."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from tiny_models import LENGTHS, make_sequences, packed_inputs, tiny_config
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig

from rlightning.models.counts import build_empty, model_flops, sequence_flops, visible_pairs

EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "llama": {"tie_word_embeddings": False, "mlp_bias": True},
    "qwen2": {},
    "mistral": {"sliding_window": 4},
    "gemma3_text": {"head_dim": 16, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_moe": {**EXPERTS, "head_dim": 16, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def attend_pair_by_pair(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, cu_seq_lens_q: Tensor, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention in which each token's products are with those tokens alone that it sees."""
    bounds, window = cu_seq_lens_q.tolist(), kwargs.get("sliding_window")
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1)[0] for x in (key, value))
    rows = []
    for begin, end in pairwise(bounds):
        for token in range(begin, end):
            first = begin if window is None else max(begin, token - window + 1)
            scores = query[0, :, token : token + 1] @ key[:, first : token + 1].mT
            rows.append(scores.softmax(-1) @ value[:, first : token + 1])
    return torch.cat(rows, dim=1).transpose(0, 1)[None], None


AttentionInterface.register("pair_by_pair", attend_pair_by_pair)


def make_config(kind: str) -> PreTrainedConfig:
    return tiny_config(kind, **KINDS[kind])


def count_with_torch(config: PreTrainedConfig) -> int:
    """Operations of forward and backward, without those that make a table of positions."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(
        config,
        attn_implementation="pair_by_pair",
        experts_implementation="eager",  # torch does not count grouped products
    )
    counter = FlopCounterMode(display=False)
    with counter:
        model(**packed_inputs(make_sequences())).logits.sum().backward()
    by_module = counter.get_flop_counts()
    positions = sum(sum(ops.values()) for name, ops in by_module.items() if name.endswith("rotary_emb"))
    return counter.get_total_flops() - positions


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long
def test_operations_are_those_that_torch_counts(kind: str) -> None:
    config = make_config(kind)
    assert sequence_flops(config, torch.tensor(LENGTHS)).sum().item() == count_with_torch(config)


def test_a_frozen_base_has_no_gradients_of_weights() -> None:
    """A third of the matrices' operations; what the adapter's 100 weights take is added."""
    config, lengths = make_config("qwen3"), torch.tensor(LENGTHS)
    whole = sequence_flops(config, lengths, lengths)
    flops = model_flops(config)
    saved = 2 * (flops.matrices + flops.head) * lengths
    assert sequence_flops(config, lengths, lengths, adapter_weights=100).tolist() == (
        (whole - saved + 3 * 2 * 100 * lengths).tolist()
    )


def test_unpredicted_token_costs_no_output_layer_flops() -> None:
    config, lengths = make_config("qwen3"), torch.tensor(LENGTHS)
    less = sequence_flops(config, lengths) - sequence_flops(config, lengths, lengths - 1)
    assert less.tolist() == [6 * 40 * 32] * len(LENGTHS)  # vocabulary x hidden size


def test_visible_pairs_count_causal_tokens_within_window() -> None:
    lengths = torch.tensor([1, 3, 5], dtype=torch.float64)
    assert visible_pairs(lengths, None).tolist() == [1, 6, 15]
    assert visible_pairs(lengths, 3).tolist() == [1, 6, 1 + 2 + 3 + 3 + 3]
    assert visible_pairs(lengths, 64).tolist() == [1, 6, 15]


def test_an_empty_model_is_built_once() -> None:
    assert build_empty(tiny_config("qwen3")) is build_empty(tiny_config("qwen3"))
