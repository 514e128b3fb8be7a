"""FlashAttention 4 without a GPU: when it is taken, and what lies around its kernels."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config
from varlen_on_cpu import FlashAttentionOnCPU, run_kernels_on_cpu

from rlightning.models import flash_attention_trial
from rlightning.models.attention import describe_attention, padded_attention
from rlightning.models.flash_attention_4 import INTERFACE, flash_attention

CUDA = torch.device("cuda", 0)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU whose kernels run on the CPU, without the package."""
    run_kernels_on_cpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    compare = flash_attention_trial._compare
    monkeypatch.setattr(flash_attention_trial, "_compare", lambda _, *sizes: compare(torch.device("cpu"), *sizes))
    monkeypatch.setitem(sys.modules, INTERFACE, None)
    flash_attention_trial._find_obstacle.cache_clear()
    yield
    flash_attention_trial._find_obstacle.cache_clear()


def describe(head_size: int = 16) -> str:
    config = Qwen3Config(num_attention_heads=4, num_key_value_heads=2, head_dim=head_size)
    return describe_attention(config, CUDA, torch.bfloat16)


@pytest.mark.usefixtures("hopper")
def test_log_says_why_not_flash_attention_4(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = r"packed (varlen_attn, as FlashAttention 4 "
    missing = describe()
    assert missing.startswith(f"{slow}is not installed (") and missing.endswith("pip install 'rlightning[fa4]')")
    assert describe(256) == f"{slow}takes head sizes up to 128, not 256)"
    flash_attention_trial._find_obstacle.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert describe() == f"{slow}needs compute capability 9 or 10)"


@pytest.mark.usefixtures("hopper")
def test_flash_attention_4_is_taken_where_it_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, INTERFACE, FlashAttentionOnCPU(INTERFACE))
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        assert describe() == "packed (FlashAttention 4)"
    assert flash_attention_trial.flash_attention_obstacle(CUDA, torch.bfloat16, 16, 1, True) is None


def attend_too_far(*args: Any, window_size: tuple[int, None], **others: Any) -> tuple[Tensor, Tensor]:
    """Windows are a token too wide."""
    return FlashAttentionOnCPU.flash_attn_varlen_func(*args, window_size=(window_size[0] + 1, None), **others)


def differentiate_to_nan(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.full_like(q, torch.nan), torch.zeros_like(k), torch.zeros_like(v)


def take_other_arguments(query: Tensor) -> Tensor:
    return query


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("name", "function", "reason"),
    [
        ("flash_attn_varlen_func", attend_too_far, "differs from it by 0."),
        ("_flash_attn_bwd", differentiate_to_nan, "differs from it by nan"),
        ("flash_attn_varlen_func", take_other_arguments, "fails here: TypeError: "),
    ],
)
def test_wrong_flash_attention_4_is_not_taken(
    name: str, function: Callable[..., object], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = FlashAttentionOnCPU(INTERFACE)
    monkeypatch.setattr(package, name, function)
    monkeypatch.setitem(sys.modules, INTERFACE, package)
    obstacle = flash_attention_trial.flash_attention_obstacle(CUDA, torch.bfloat16, 16, 2, True)
    assert obstacle is not None and obstacle.startswith(reason)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("lengths", [([3, 1, 5], None), ([2, 1, 3], [4, 1, 9])])
def test_operator_equals_padded_attention(
    lengths: tuple[list[int], list[int] | None], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, INTERFACE, FlashAttentionOnCPU(INTERFACE))
    own, whole = lengths[0], lengths[1] or lengths[0]
    bounds: Any = [torch.tensor([0, *part]).cumsum(0).int() for part in (own, whole)]
    bounds, longest = (bounds[0], max(own)) if lengths[1] is None else (tuple(bounds), (max(own), max(whole)))
    generator = torch.Generator().manual_seed(0)
    shapes = (sum(own), 4, 8), (sum(whole), 2, 8), (sum(whole), 2, 8)
    q, k, v = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
    direction = torch.randn(q.shape, generator=generator)
    results = []
    for attend in (flash_attention, padded_attention):
        out = attend(q, k, v, bounds, longest, 0.3, window)
        results.append([out, *torch.autograd.grad(out, (q, k, v), direction)])
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


KINDS = [
    (kind, number)
    for kind in ("sequences", "windows", "shared prefixes")
    for number in range(len(flash_attention_trial._trials(kind)))
]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("kind", "number"), KINDS)
@pytest.mark.parametrize(("factor", "reason"), [(2.0, "differs from it by 1"), (torch.nan, "differs from it by nan")])
def test_kernels_of_each_trial_count(
    kind: str, number: int, factor: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package has kernels of their own for few tokens and for many sequences: only those are wrong here."""
    num_queries = flash_attention_trial._trials(kind)[number].num_queries

    def differentiate(q: Tensor, *others: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        grad_q, grad_k, grad_v = FlashAttentionOnCPU._flash_attn_bwd(q, *others, **options)
        return grad_q * (factor if len(q) == num_queries else 1.0), grad_k, grad_v

    package = FlashAttentionOnCPU(INTERFACE)
    monkeypatch.setattr(package, "_flash_attn_bwd", differentiate)
    monkeypatch.setitem(sys.modules, INTERFACE, package)
    if kind == "shared prefixes":
        obstacle = flash_attention_trial.shared_prefix_obstacle(CUDA, torch.bfloat16, 16, 2)
    else:
        obstacle = flash_attention_trial.flash_attention_obstacle(CUDA, torch.bfloat16, 16, 2, kind == "windows")
    assert obstacle is not None and obstacle.startswith(reason)


@pytest.mark.usefixtures("hopper")
def test_flash_attention_4_is_taken_over_shared_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, INTERFACE, FlashAttentionOnCPU(INTERFACE))
    assert flash_attention_trial.shared_prefix_obstacle(CUDA, torch.bfloat16, 16, 2) is None


@pytest.mark.usefixtures("hopper")
def test_queries_without_keys_must_count_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that gives them a finite log-sum-exp is wrong over shared prefixes alone."""

    def attend(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        out, sums = FlashAttentionOnCPU.flash_attn_varlen_func(*args, **options)
        return out, sums.masked_fill(sums.isneginf(), 0.0)

    package = FlashAttentionOnCPU(INTERFACE)
    monkeypatch.setattr(package, "flash_attn_varlen_func", attend)
    monkeypatch.setitem(sys.modules, INTERFACE, package)
    assert flash_attention_trial.flash_attention_obstacle(CUDA, torch.bfloat16, 16, 2, False) is None
    obstacle = flash_attention_trial.shared_prefix_obstacle(CUDA, torch.bfloat16, 16, 2)
    assert obstacle is not None and obstacle.startswith("differs from it by ")
