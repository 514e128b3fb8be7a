"""The kernels that only CUDA has, against those that the other tests hold to transformers."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_sequences, packed_inputs, save_tiny
from torch import Tensor
from torch._dynamo.utils import counters

from rlightning.models import attention, load_policy, output_layer, packed_logprobs
from rlightning.models.attention import packed_attention, padded_attention, varlen_attention, varlen_obstacle
from rlightning.models.flash_attention_4 import flash_attention
from rlightning.models.flash_attention_trial import flash_attention_obstacle
from rlightning.models.layers import checkpoint_layers, compile_layers, decoder_layers
from rlightning.models.output_layer import chunked_logprobs
from rlightning.types import RolloutBatch
from rlightning.types.shared_prefixes import SharedPrefixes, find_prefixes, share_prefixes

pytestmark = pytest.mark.gpu

Lengths = tuple[list[int], list[int]]
RAGGED: Lengths = ([1, 7, 300, 64, 1, 513], [1, 7, 300, 64, 1, 513])
SUFFIXES: Lengths = ([1, 70, 130, 5, 256], [1, 200, 130, 900, 640])
"""Of queries and of keys: with shared prefixes."""


@pytest.fixture
def flash_attention_4() -> None:
    """Skips where FlashAttention 4 cannot be used; not where it fails."""
    reason = flash_attention_obstacle(torch.device("cuda", 0), torch.bfloat16, 64, 2, False)
    if reason is not None and reason.startswith(("needs", "is not installed")):
        pytest.skip(f"FlashAttention 4 {reason}")
    assert reason is None


@pytest.fixture(params=["varlen_attn", "flash_attention_4"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has packed attention take this one, for the head sizes that it has."""
    if request.param == "varlen_attn":
        monkeypatch.setattr(attention, "flash_attention_obstacle", lambda *_: "is not to be used")
    else:
        request.getfixturevalue("flash_attention_4")
        monkeypatch.setattr(attention, "MIN_FLASH_KEYS", 0)


@pytest.mark.usefixtures("flash_attention_4")
@pytest.mark.parametrize("heads", [(8, 8), (16, 8), (32, 8)])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("window", [None, 1, 100])
def test_flash_attention_4_is_as_exact_as_varlen_attn(
    head_size: int, heads: tuple[int, int], window: int | None
) -> None:
    """Against float64, results and gradients."""
    device = torch.device("cuda", 0)
    assert flash_attention_obstacle(device, torch.bfloat16, head_size, heads[0] // heads[1], window is not None) is None
    generator = torch.Generator(device).manual_seed(0)
    for lengths in (RAGGED, SUFFIXES):
        bounds = tuple(torch.tensor([0, *part], device=device).cumsum(0).int() for part in lengths)
        longest = max(lengths[0]), max(lengths[1])
        shapes = [(sum(lengths[is_key]), heads[is_key], head_size) for is_key in (0, 1, 1)]
        half = [torch.randn(shape, device=device, generator=generator).bfloat16().requires_grad_() for shape in shapes]
        exact = [tensor.detach().double().requires_grad_() for tensor in half]
        direction = torch.randn(shapes[0], device=device, generator=generator).bfloat16()
        results = []
        ways: list[tuple[Callable[..., Tensor], list[Tensor]]]
        ways = [(flash_attention, half), (varlen_attention, half), (padded_attention, exact)]
        for attend, inputs in ways:
            out = attend(*inputs, bounds, longest, 0.1, window)
            results.append([out, *torch.autograd.grad(out, inputs, direction.to(out.dtype))])
        for new, old, truth in zip(*results, strict=True):
            assert new.dtype == torch.bfloat16
            # With a window of 1 the gradients of queries and keys are 0, and differences of float32 sums are left.
            assert (new - truth).norm() <= 1.5 * (old - truth).norm() + 1e-3 * truth.norm() + 1e-2


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("head_size", [12, 64, 128, 256, 264])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("window", [None, 1, 3, 64, 100])
def test_attention_in_half_precision(head_size: int, groups: int, window: int | None) -> None:
    """Packed where the kernel can, padded where it cannot, against padded attention in float32."""
    is_packed = varlen_obstacle(torch.device("cuda", 0), torch.bfloat16, head_size) is None
    assert is_packed == (head_size in (64, 128, 256))
    generator = torch.Generator("cuda").manual_seed(0)
    bounds = torch.tensor([0, 7, 8, 13, 77], dtype=torch.int32, device="cuda")
    shapes = [(1, heads, 77, head_size) for heads in (8, 8 // groups, 8 // groups)]
    exact = [torch.randn(shape, device="cuda", generator=generator, requires_grad=True) for shape in shapes]
    half = [tensor.detach().bfloat16().requires_grad_() for tensor in exact]
    direction = torch.randn(1, 77, 8, head_size, device="cuda", generator=generator)
    results = []
    for inputs in (exact, half):
        query, key, value = inputs
        out, _ = packed_attention(
            torch.nn.Module(), query, key, value, None, cu_seq_lens_q=bounds, max_length_q=64, sliding_window=window
        )
        results.append([out, *torch.autograd.grad((out.float() * direction).sum(), inputs)])
    for got, expected in zip(results[1], results[0], strict=True):
        assert got.dtype == torch.bfloat16
        assert (got.float() - expected).norm() <= 0.01 * expected.norm() + 1e-3


def test_shared_heads_are_repeated_ones() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    bounds = torch.tensor([0, 7, 8, 13, 77], dtype=torch.int32, device="cuda")
    inputs = [
        torch.randn(77, heads, 64, device="cuda", generator=generator).bfloat16().requires_grad_()
        for heads in (8, 2, 2)
    ]
    results = []
    for copies in (1, 4):
        query, key, value = inputs
        key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
        out = attention.varlen_attention(query, key, value, bounds, 64, None, 5)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for some, other in zip(*results, strict=True):
        assert (some.float() - other.float()).norm() <= 0.01 * other.float().norm()


def share_tree(*shapes: tuple[int, int]) -> tuple[RolloutBatch, SharedPrefixes]:
    """Sequences of a common start, of which each has so many tokens, and so many of its own; on the GPU."""
    sequences = [[*range(kept), *[2000 + n] * new] for n, (kept, new) in enumerate(shapes)]
    batch = RolloutBatch.of_sequences(sequences)
    shared = share_prefixes(batch.cu_seqlens, find_prefixes(batch.token_ids, batch.cu_seqlens))
    return batch.to("cuda"), shared.to(torch.device("cuda"))


def attend_shared(batch: RolloutBatch, shared: SharedPrefixes, *heads: Tensor, window: int | None = None) -> Tensor:
    """Attention [U, H, D] of queries, keys and values, each [U, heads, D]."""
    inputs = attention.packed_inputs(batch.token_ids, batch.position_ids, batch.cu_seqlens, batch.max_length, shared)
    options = {name: value for name, value in inputs.items() if name not in ("input_ids", "position_ids", "use_cache")}
    query, key, value = (x.transpose(0, 1)[None] for x in heads)
    return packed_attention(torch.nn.Module(), query, key, value, None, sliding_window=window, **options)[0][0]


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 50])
def test_shared_prefixes_in_half_precision(head_size: int, groups: int, window: int | None) -> None:
    """Without copies, or with them where there is a window, against copies in float32; the tree is five deep."""
    generator = torch.Generator("cuda").manual_seed(0)
    batch, shared = share_tree((700, 5), (700, 1), (600, 130), (300, 400), (300, 2), (299, 257), (2, 64), (0, 80))
    shapes = [(shared.unique.numel(), heads, head_size) for heads in (8, 8 // groups, 8 // groups)]
    exact = [torch.randn(shape, device="cuda", generator=generator, requires_grad=True) for shape in shapes]
    half = [tensor.detach().bfloat16().requires_grad_() for tensor in exact]
    direction = torch.randn(shapes[0], device="cuda", generator=generator)
    results = []
    for inputs in (exact, half):
        out = attend_shared(batch, shared, *inputs, window=window)
        results.append([out, *torch.autograd.grad((out.float() * direction).sum(), inputs)])
    for got, expected in zip(results[1], results[0], strict=True):
        assert got.dtype == torch.bfloat16
        assert (got.float() - expected).norm() <= 0.01 * expected.norm() + 1e-3


@pytest.mark.usefixtures("kernel")
def test_shared_keys_are_not_copied() -> None:
    batch, shared = share_tree(*[(2000, 100)] * 8)
    query, key, value = (
        torch.randn(shared.unique.numel(), heads, 64, device="cuda").bfloat16().requires_grad_() for heads in (8, 2, 2)
    )
    before = torch.cuda.memory_allocated()
    out = attend_shared(batch, shared, query, key, value)
    kept = torch.cuda.memory_allocated() - before
    block = 2 << 20
    assert kept <= 2 * out.numel() + 4 * out.shape[0] * out.shape[1] + block  # copies take 9 MB
    assert torch.equal(attend_shared(batch, shared, query, key, value), out)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_policy_over_shared_prefixes_in_mixed_precision(is_compiled: bool, tmp_path: Path) -> None:
    """As near to float32 as each sequence alone."""
    sizes: dict[str, Any] = {"head_dim": 64, "vocab_size": 2100, "max_position_embeddings": 1024}
    exact = torch.nn.Module.cuda(load_policy(save_tiny("qwen3", tmp_path, **sizes)))
    alone, once = copy.deepcopy(exact), copy.deepcopy(exact)
    if is_compiled:
        torch.compiler.reset()
        compile_layers(once)
    trees = [[(500, 20), (500, 1), (400, 130)], [(200, 40)] * 5, [(300, 5), (250, 5), (200, 5), (150, 5), (100, 5)]]
    for tree in trees:
        batch, shared = share_tree(*tree)
        found = []
        for policy, layout in ((exact, None), (alone, None), (once, shared)):
            batch.shared = layout
            policy.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=policy is not exact):
                logprobs, _ = packed_logprobs(policy, batch)
            logprobs.sum().backward()
            found.append([logprobs.detach(), *[parameter.grad for parameter in decoder_layers(policy).parameters()]])
        for truth, others, some in zip(*found, strict=True):
            assert (some - truth).norm() <= 2 * (others - truth).norm() + 0.01 * truth.norm()


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(("kind", "kinds"), [("qwen3", 1), ("gemma3_text", 2)])
def test_compiled_layers_in_mixed_precision(kind: str, kinds: int, tmp_path: Path) -> None:
    """Of all shapes a graph a kind of layer with gradient and one without; as near to float32 as eager layers are."""
    config: dict[str, Any] = {"head_dim": 16, "num_hidden_layers": 3}
    if kinds == 2:
        config |= {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    exact = torch.nn.Module.cuda(load_policy(save_tiny(kind, tmp_path, **config)))
    eager, compiled = copy.deepcopy(exact), copy.deepcopy(exact)
    torch.compiler.reset()
    counters.clear()
    compile_layers(compiled)
    checkpoint_layers(compiled, 1)
    sequences = make_sequences()
    for parts in (sequences, sequences[:1], sequences[2:], sequences[1:2], sequences * 3):
        inputs = {
            name: value.cuda() if isinstance(value, torch.Tensor) else value
            for name, value in packed_inputs(parts).items()
        }
        found = []
        for policy, is_mixed in ((exact, False), (eager, True), (compiled, True)):
            with torch.autocast("cuda", torch.bfloat16, enabled=is_mixed):
                with torch.no_grad():
                    before = policy.base_model(**inputs).last_hidden_state.float()
                hidden = policy.base_model(**inputs).last_hidden_state.float()
            policy.zero_grad()
            hidden.square().sum().backward()
            gradients = [parameter.grad for parameter in decoder_layers(policy).parameters()]
            found.append([before, hidden.detach(), *gradients])
        for some, others, truth in zip(found[2], found[1], found[0], strict=True):
            assert (some - truth).norm() <= 2 * (others - truth).norm() + 0.01 * truth.norm()
    assert counters["stats"]["unique_graphs"] == 2 * kinds and not counters["graph_break"]


@pytest.mark.parametrize("has_temperatures", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_kernels_of_logits(softcap: float | None, has_temperatures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_layer, "CHUNK_BYTES", 128 * 1000 * 4)
    results = []
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(0)
        hidden, weight = (torch.randn(n, 16, generator=generator) for n in (300, 1000))
        hidden, weight = (tensor.to(device).requires_grad_() for tensor in (hidden, weight))
        targets = torch.randint(1000, (300,), generator=generator).to(device)
        temperature = torch.linspace(0.5, 2.0, 300).to(device) if has_temperatures else 0.7
        picked, entropy = chunked_logprobs(
            hidden, weight, targets, temperature=temperature, softcap=softcap, needs_entropy_grad=True
        )
        gradients = torch.autograd.grad((picked + entropy).sum(), [hidden, weight])
        results.append([tensor.cpu() for tensor in (picked, entropy, *gradients)])
    torch.testing.assert_close(results[1], results[0], atol=2e-3, rtol=2e-3)


def test_kept_logits_give_the_same_bits_and_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary, num_tokens = 32000, 1000
    monkeypatch.setattr(output_layer, "CHUNK_BYTES", 256 * vocabulary * 2)
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(vocabulary, 256, device="cuda", generator=generator).bfloat16().requires_grad_()
    hidden = torch.randn(num_tokens, 256, device="cuda", generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(vocabulary, (num_tokens,), device="cuda", generator=generator)
    found, kept_bytes = [], []
    for is_kept in (False, True):
        before = torch.cuda.memory_allocated()
        picked, entropy = chunked_logprobs(hidden, weight, targets, needs_entropy_grad=True, keeps_logits=is_kept)
        kept_bytes.append(torch.cuda.memory_allocated() - before)
        total = (picked + entropy).sum()
        found.append((picked, entropy, *torch.autograd.grad(total, [hidden, weight], retain_graph=True)))
        assert torch.cuda.memory_allocated() - before < kept_bytes[0] + 2 * (weight.numel() + hidden.numel()) + (
            8 << 20
        )
    assert all(torch.equal(kept, again) for kept, again in zip(*found, strict=True))
    assert kept_bytes[1] - kept_bytes[0] == pytest.approx(2 * num_tokens * vocabulary, rel=0.1)


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_logprobs_in_bfloat16_take_one_chunk(softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their gradient is summed in float32 over sixteen chunks."""
    size, vocabulary = 256, 32000
    chunk = 256 * vocabulary * 2
    monkeypatch.setattr(output_layer, "CHUNK_BYTES", chunk)
    generator = torch.Generator("cuda").manual_seed(0)
    weight = (torch.randn(vocabulary, size, device="cuda", generator=generator) / 8).bfloat16().requires_grad_()
    for num_tokens in (1000, 4096):
        hidden = torch.randn(num_tokens, size, device="cuda", generator=generator).bfloat16().requires_grad_()
        targets = torch.randint(vocabulary, (num_tokens,), device="cuda", generator=generator)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        picked, entropy = chunked_logprobs(hidden, weight, targets, softcap=softcap, needs_entropy_grad=True)
        forward = torch.cuda.max_memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients = torch.autograd.grad((picked + entropy).sum(), [hidden, weight])
        backward = torch.cuda.max_memory_allocated() - before
    # 40 bytes a token for what is known of it, and the allocator counts large blocks in whole 2 MiB; cuBLAS has 32 MiB
    # of its own, taken in the first round.
    block = 2 << 20
    assert forward < chunk + 40 * num_tokens + block
    assert backward < chunk + 4 * weight.numel() + 2 * hidden.numel() + 40 * num_tokens + 3 * block
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    logits = exact[0] @ exact[1].T
    table = (logits if softcap is None else softcap * torch.tanh(logits / softcap)).log_softmax(-1)
    expected = table.gather(1, targets[:, None])[:, 0] - (table.exp() * table).sum(-1)
    for got, other in zip(gradients, torch.autograd.grad(expected.sum(), exact), strict=True):
        assert got.dtype == torch.bfloat16
        assert (got - other).norm() < 0.01 * other.norm()


def test_a_deep_model_is_loaded_where_tf32_is_allowed(tmp_path: Path) -> None:
    folder = save_tiny("qwen3", tmp_path, head_dim=64, hidden_size=1024, intermediate_size=4096, num_hidden_layers=36)
    torch.set_float32_matmul_precision("high")
    try:
        with torch.device("cuda"):
            assert load_policy(folder).device.type == "cuda"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_models_in_mixed_precision(kind: str, tmp_path: Path) -> None:
    policy = load_policy(save_tiny(kind, tmp_path, head_dim=16, sliding_window=3))
    inputs = packed_inputs(make_sequences())
    exact = policy(**inputs).logits
    torch.nn.Module.cuda(policy)
    on_gpu = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    with torch.autocast("cuda", torch.bfloat16):
        mixed = policy(**on_gpu).logits
    assert (mixed.float().cpu() - exact).norm() < 0.02 * exact.norm()
