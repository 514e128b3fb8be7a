"""Activations against hand-counted formulas, and against what torch really keeps."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from planned import QWEN3, SMALL
from tiny_models import tiny_config
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3Config

from rlightning.errors import ConfigError
from rlightning.memory_plan.activations import Decoder, measure_activations
from rlightning.models import layers
from rlightning.models.attention import PACKED_ATTENTION
from rlightning.models.layers import checkpoint_layers, compile_layers

AS_INDUCTOR = aot_autograd(
    fw_compiler=boxed_nop,
    partition_fn=min_cut_rematerialization_partition,
    decompositions=select_decomp_table(),
)
"""What decides about activations as inductor does, and compiles nothing."""
OTHER_KINDS = ("glm4_moe", "gpt2")
MORE_KINDS = ("solar_open", "exaone_moe", "opt")


@pytest.mark.long
@pytest.mark.parametrize("is_autocast", [False, True])
def test_activations_of_qwen3_are_those_of_the_formula(is_autocast: bool) -> None:
    tokens, hidden, queries, keys, inner, heads = 4096, 1024, 16 * 128, 8 * 128, 3072, 16
    decoder = Decoder(
        dtype=torch.float32 if is_autocast else torch.bfloat16, is_autocast=is_autocast, gradient_checkpointing=False
    )
    kept = measure_activations(SMALL, decoder, tokens, 512).kept
    layer = (22 if is_autocast else 16) * hidden + 6 * queries + 6 * keys + 8 * inner
    layer += 4 * queries + 4 * keys
    layer += 4 * heads + 4 * (2 + heads + 8)  # log-sum-exps, and the norms' reciprocals
    copies = 2 * (2 * hidden * queries + 2 * hidden * keys + 3 * hidden * inner) if is_autocast else 0
    assert kept == pytest.approx(28 * (tokens * layer + copies), rel=0.01)


@pytest.mark.long
def test_checkpointing_keeps_a_layers_input() -> None:
    decoder = Decoder(dtype=torch.bfloat16, is_autocast=False, gradient_checkpointing=True)
    more, fewer = (
        measure_activations(Qwen3Config(**QWEN3 | {"num_hidden_layers": n}, hidden_size=1024), decoder, 4096, 512)
        for n in (28, 8)
    )
    assert more.kept - fewer.kept == pytest.approx(20 * 4096 * 1024 * 2)


@pytest.mark.long
def test_tensor_parallelism_halves_what_layers_compute() -> None:
    whole, half = (
        measure_activations(
            SMALL,
            Decoder(dtype=torch.bfloat16, is_autocast=False, gradient_checkpointing=False, tensor_parallel_size=size),
            4096,
            512,
        ).kept
        for size in (1, 2)
    )
    attention = 4 * 2048 + 4 * 1024
    inner = attention + 6 * 2048 + 6 * 1024 + 8 * 3072 + 4 * 16 + 4 * 24
    assert whole - half == pytest.approx(28 * 4096 * inner / 2, rel=0.01)


def kept_bytes(run: Callable[[], Tensor], others: Iterable[Tensor]) -> int:
    """What a forward pass really keeps for its backward, and its result, without the tensors that were there before."""
    own = {tensor.untyped_storage().data_ptr() for tensor in others}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    found[result.untyped_storage().data_ptr()] = result.untyped_storage().nbytes()
    return sum(size for pointer, size in found.items() if pointer not in own)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "way"),
    [(kind, way) for kind in ("qwen3", "qwen2", "llama") for way in ("eager", "checkpointed")]
    + [("qwen3", "compiled")],
)
def test_activations_are_what_the_packed_forward_keeps(kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gradient_checkpointing = way == "checkpointed"
    config: PreTrainedConfig = tiny_config(kind, hidden_size=64, num_hidden_layers=4)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=PACKED_ATTENTION)
    if gradient_checkpointing:
        checkpoint_layers(model, 4)
    if way == "compiled":
        torch.compiler.reset()
        monkeypatch.setattr(layers, "BACKEND", AS_INDUCTOR)
        compile_layers(model)
    model.train()
    length, number = 48, 8
    tokens = torch.randint(3, 40, (1, length * number))
    positions = torch.arange(length).repeat(number)[None]
    bounds = torch.arange(number + 1, dtype=torch.int32) * length

    def run() -> Tensor:
        hidden: Tensor = model.base_model(
            input_ids=tokens,
            position_ids=positions,
            use_cache=False,
            cu_seq_lens_q=bounds,
            cu_seq_lens_k=bounds,
            max_length_q=length,
            max_length_k=length,
        ).last_hidden_state
        return hidden

    decoder = Decoder(
        dtype=torch.float32,
        is_autocast=False,
        gradient_checkpointing=gradient_checkpointing,
        is_compiled=way == "compiled",
    )
    planned = measure_activations(config, decoder, length * number, length)
    kept = kept_bytes(run, (*model.parameters(), *model.buffers(), tokens, positions, bounds))
    if gradient_checkpointing:  # the rotary tables: checkpoint() holds on to keyword arguments without saving them
        kept += 2 * 4 * tokens.numel() * model.model.rotary_emb.inv_freq.numel() * 2
    assert planned.kept == pytest.approx(kept, rel=0.03)


@pytest.mark.long
def test_activations_scale_with_layers_of_each_kind() -> None:
    kinds = ["sliding_attention", "full_attention"] * 3
    config = tiny_config("qwen3", num_hidden_layers=6, layer_types=kinds, sliding_window=8, use_sliding_window=True)
    # in float32 a window is a mask over padded sequences
    decoder = Decoder(dtype=torch.float32, is_autocast=False, gradient_checkpointing=False)
    mixed = measure_activations(config, decoder, 256, 64).kept
    config.layer_types = ["full_attention"] * 6
    assert mixed > measure_activations(config, decoder, 256, 64).kept > 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("gemma3_text", {"sliding_window": 16}),
        pytest.param(
            *("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
            marks=pytest.mark.slow,
        ),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    ],
)
def test_other_architectures_run_without_values(kind: str, settings: dict[str, Any]) -> None:
    config = tiny_config(kind, num_hidden_layers=4, **settings)
    kept, input_kept = (
        measure_activations(
            config, Decoder(dtype=torch.bfloat16, is_autocast=False, gradient_checkpointing=is_checkpointed), 256, 64
        ).kept
        for is_checkpointed in (False, True)
    )
    assert kept > 2 * input_kept > 4 * 256 * 32 * 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "is_compiled"),
    [
        *((kind, False) for kind in ("qwen3_moe", *OTHER_KINDS)),
        pytest.param("qwen3_moe", True, marks=pytest.mark.slow),
        *(pytest.param(kind, False, marks=pytest.mark.slow) for kind in MORE_KINDS),
    ],
)
def test_experts_and_layers_of_other_kinds_run_without_values(kind: str, is_compiled: bool) -> None:
    """Under autocast, in which torch has no grouped products without values; with biases that are buffers."""
    decoder = Decoder(dtype=torch.float32, is_autocast=True, gradient_checkpointing=False, is_compiled=is_compiled)
    assert measure_activations(tiny_config(kind), decoder, 256, 64).kept > 2 * 256 * 32 * 4


@pytest.mark.long
def test_layers_that_cannot_be_fewer_are_named() -> None:
    """Gemma 4 has the last one see all tokens, whatever its kind."""
    decoder = Decoder(dtype=torch.bfloat16, is_autocast=False, gradient_checkpointing=False)
    with pytest.raises(ConfigError, match=r"The memory of a gemma4_text cannot be planned: .*Measure it on a GPU"):
        measure_activations(tiny_config("gemma4_text"), decoder, 256, 64)


@pytest.mark.long
def test_a_default_device_changes_nothing() -> None:
    """Lightning makes models with the strategy's device as the default one."""
    decoder = Decoder(dtype=torch.float32, is_autocast=True, gradient_checkpointing=False)
    expected = measure_activations(SMALL, decoder, 256, 128)
    other = Qwen3Config(**SMALL.to_dict() | {"bos_token_id": 7})  # what was measured of the same one is remembered
    with torch.device("meta"):
        assert measure_activations(other, decoder, 256, 128) == expected
