from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import load_eager, make_sequences, packed_inputs, save_tiny
from torch import Tensor
from varlen_on_cpu import run_kernels_on_cpu

from rlightning.models import attention, load_policy
from rlightning.models.attention import kernel_obstacle, packed_attention
from rlightning.types import RolloutBatch
from rlightning.types.shared_prefixes import find_prefixes, share_prefixes

WINDOW_THEN_ALL = ["sliding_attention", "full_attention"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen3-untied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
    "llama": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": False}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    "mistral": ("mistral", {"sliding_window": 3}),
    "mistral-wide": ("mistral", {"sliding_window": 12}),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 8, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi3": ("phi3", {"sliding_window": 3}),
    "gpt2": ("gpt2", {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1}),
    "gpt_neox": ("gpt_neox", {}),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", {}),
    "starcoder2": ("starcoder2", {"residual_dropout": 0.1, "embedding_dropout": 0.1, "attention_dropout": 0.1}),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_packed_is_each_sequence_alone(name: str, tmp_path: Path) -> None:
    kind, config = MODELS[name]
    folder = save_tiny(kind, tmp_path, **config)
    packed, alone, sequences = load_policy(folder), load_eager(folder), make_sequences()
    got = packed(**packed_inputs(sequences)).logits[0]
    expected = torch.cat([alone(sequence[None], use_cache=False).logits[0] for sequence in sequences])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    direction = torch.randn(got.shape, generator=torch.Generator().manual_seed(2))
    torch.autograd.backward([(got * direction).sum(), (expected * direction).sum()])
    for parameter, other in zip(packed.parameters(), alone.parameters(), strict=True):
        if other.grad is not None:
            assert parameter.grad is not None
            assert (parameter.grad - other.grad).norm() <= 1e-5 * (1 + other.grad.norm())


def test_bfloat16_stays_within_its_noise(tmp_path: Path) -> None:
    folder = save_tiny("qwen3", tmp_path, head_dim=8)
    sequences = make_sequences()
    exact = load_policy(folder)(**packed_inputs(sequences)).logits[0]
    half = load_policy(folder, torch.bfloat16)(**packed_inputs(sequences)).logits[0].float()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = load_policy(folder)(**packed_inputs(sequences)).logits[0]
    for other in (half, mixed.float()):
        assert 0 < (other - exact).norm() < 0.02 * exact.norm()


def test_autocast_covers_attention() -> None:
    query, key, value = (torch.randn(1, 2, 4, 8) for _ in range(3))
    bounds = torch.tensor([0, 1, 4], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = packed_attention(torch.nn.Module(), query, key, value, None, cu_seq_lens_q=bounds, max_length_q=3)
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_shared_segments_give_the_results_of_copies(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Result and gradients by merged calls of the kernel, against copied keys and values in float64."""
    starts = [[3, 4, 5, 6, 7], [3, 4, 5, 8], [3, 4, 9, 9], [10, 11], [10, 11], [10, 12, 13]]
    batch = RolloutBatch.of_sequences(starts)
    shared = share_prefixes(batch.cu_seqlens, find_prefixes(batch.token_ids, batch.cu_seqlens))
    inputs = attention.packed_inputs(batch.token_ids, batch.position_ids, batch.cu_seqlens, batch.max_length, shared)
    options = {name: value for name, value in inputs.items() if name not in ("input_ids", "position_ids", "use_cache")}
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, shared.unique.numel(), 8) for heads in (4, 2, 2)]
    exact = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    direction = torch.randn(1, shapes[0][2], 4, 8, generator=generator, dtype=torch.float64)
    results = []
    for leaves in (exact, [x.detach().to(dtype).requires_grad_() for x in exact]):
        query, key, value = leaves
        out, _ = packed_attention(torch.nn.Module(), query, key, value, None, scaling=0.7, **options)
        results.append([out, *torch.autograd.grad(out, leaves, direction.to(out.dtype))])
        run_kernels_on_cpu(monkeypatch)
    tolerance = 0.01 if dtype == torch.bfloat16 else 1e-12
    for expected, got in zip(*results, strict=True):
        assert got.dtype == dtype
        assert (got.double() - expected).norm() <= tolerance * expected.norm()


def attend(window: int | None) -> Tensor:
    """Where each of the tokens of two sequences of 3 and 2 looks: equal scores over what it sees."""
    bounds = torch.tensor([0, 3, 5], dtype=torch.int32)
    zeros = torch.zeros(1, 1, 5, 5)
    out, _ = packed_attention(
        torch.nn.Module(),
        zeros,
        zeros,
        torch.eye(5)[None, None],
        None,
        cu_seq_lens_q=bounds,
        max_length_q=3,
        sliding_window=window,
    )
    return out[0, :, 0]


def test_attention_equals_hand_computed_weights() -> None:
    third, half = 1 / 3, 1 / 2
    first = [[1, 0, 0, 0, 0], [half, half, 0, 0, 0], [third, third, third, 0, 0]]
    second = [[0, 0, 0, 1, 0], [0, 0, 0, half, half]]
    torch.testing.assert_close(attend(None), torch.tensor(first + second))
    torch.testing.assert_close(attend(3), torch.tensor(first + second))
    first[2] = [0, half, half, 0, 0]
    torch.testing.assert_close(attend(2), torch.tensor(first + second))
    torch.testing.assert_close(attend(1), torch.eye(5))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"softcap": 50.0}, "Module asks attention for 'softcap'"),
        ({"s_aux": torch.zeros(1)}, "Module asks attention for 's_aux'"),
        ({"dropout": 0.1}, r"dropout=0\.1"),
        ({"cu_seq_lens_q": None}, "does not tell attention where a sequence ends"),
    ],
)
def test_what_would_change_the_result_is_refused(argument: dict[str, Any], message: str) -> None:
    zeros = torch.zeros(1, 1, 2, 4)
    bounds: dict[str, Any] = {"cu_seq_lens_q": torch.tensor([0, 2], dtype=torch.int32), "max_length_q": 2}
    with pytest.raises(NotImplementedError, match=message):
        packed_attention(torch.nn.Module(), zeros, zeros, zeros, None, **bounds | argument)


KERNELS = ("flash_attention", "varlen_attention", "padded_attention")


@pytest.mark.parametrize("window", [None, 3])
def test_the_fastest_kernel_without_an_obstacle_is_taken(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    obstacles: dict[str, str | None] = {"varlen": None, "flash": None}
    asked, taken = [], []

    def find_obstacle(*sizes: object) -> str | None:
        asked.append(sizes)
        return obstacles["flash"]

    def stub(name: str) -> Callable[..., Tensor]:
        def attend(q: Tensor, *_: object) -> Tensor:
            taken.append(name)
            return q

        return attend

    for name in KERNELS:
        monkeypatch.setattr(attention, name, stub(name))
    monkeypatch.setattr(attention, "flash_attention_obstacle", find_obstacle)
    monkeypatch.setattr(attention, "varlen_obstacle", lambda _, *sizes: obstacles["varlen"] or kernel_obstacle(*sizes))
    bounds = torch.tensor([0, 5], dtype=torch.int32)
    query, key, value = (torch.zeros(1, heads, 5, 16, dtype=torch.bfloat16) for heads in (6, 2, 2))
    options: dict[str, Any] = {"cu_seq_lens_q": bounds, "max_length_q": 5, "sliding_window": window}
    for obstacles["flash"] in (None, "is not installed"):
        packed_attention(torch.nn.Module(), query, key, value, None, **options)
    packed_attention(torch.nn.Module(), query, key, value, None, as_on_cuda=True, **options)
    assert taken == ["flash_attention", "varlen_attention", "varlen_attention"]
    assert asked == [(query.device, torch.bfloat16, 16, 3, window is not None)] * 2
    packed_attention(torch.nn.Module(), query, key, value[..., :8], None, **options)
    obstacles["varlen"] = "it runs on the CPU"
    packed_attention(torch.nn.Module(), query, key, value, None, **options)
    assert taken[3:] == ["padded_attention"] * 2
