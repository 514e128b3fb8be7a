"""The kernels behind ``varlen_attn`` for tests without a GPU: what torch documents of them, in a loop over sequences.

They also stand behind the two functions of FlashAttention 4 that are called. With them everything around the kernels
can be tested on the CPU: layouts, windows, shared heads, compilation.
"""

import sys
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from rlightning.models import attention, flash_attention_trial
from rlightning.models.flash_attention_4 import INTERFACE


class FlashAttentionOnCPU(ModuleType):
    """What is called of FlashAttention 4's module."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int | None, int | None],
        return_lse: bool,
    ) -> tuple[Tensor, Tensor]:
        assert return_lse and window_size[1] is None
        bounds, sides = (cu_seqlens_q, cu_seqlens_k), sides_of(window_size[0], causal)
        out, sums, _ = forward(q, k, v, *bounds, len(q), len(k), causal, softmax_scale, sides)
        return out, sums.masked_fill(sums.isposinf(), -torch.inf)  # of a query without a key

    @staticmethod
    def _flash_attn_bwd(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        lse: Tensor,
        *,
        softmax_scale: float | None,
        causal: bool,
        window_size_left: int | None,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert not deterministic
        bounds, sides = (cu_seqlens_q, cu_seqlens_k), sides_of(window_size_left, causal)
        return backward(dout, q, k, v, out, lse, *bounds, len(q), len(k), causal, out, softmax_scale, sides)


def sides_of(tokens_left: int | None, is_causal: bool) -> list[int]:
    return [-1 if tokens_left is None else tokens_left, 0 if is_causal else -1]


def run_kernels_on_cpu(monkeypatch: pytest.MonkeyPatch, *, has_flash_attention: bool = False) -> None:
    """Have packed attention take ``varlen_attn`` on the CPU too, or FlashAttention 4, in any dtype."""
    if has_flash_attention:
        monkeypatch.setitem(sys.modules, INTERFACE, FlashAttentionOnCPU(INTERFACE))
        monkeypatch.setattr(flash_attention_trial, "_find_obstacle", lambda *_: None)
    if not torch._C._dispatch_has_kernel_for_dispatch_key("torch_attn::_varlen_attn", "CPU"):
        torch.library.register_kernel("torch_attn::_varlen_attn", "cpu", forward)
        torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu", backward)
    monkeypatch.setattr(attention, "varlen_obstacle", lambda *_: None)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, H, D], keys and values [T, K, D]: the result [T, H, D], log-sum-exps [H, T], a random state."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    out = torch.zeros_like(query)
    sums = torch.full((query.shape[1], query.shape[0]), torch.inf, dtype=dtype)
    for rows, keys in sequences(cu_seq_q, cu_seq_k, max_q, max_k):
        if rows.start < rows.stop and keys.start < keys.stop:
            q, k, v = split(query, key, value, rows, keys)
            scores = masked_scores(q, k, scale, window_size)
            out[rows] = (scores.softmax(-1) @ v).transpose(0, 1).to(out.dtype)
            sums[:, rows] = scores.logsumexp(-1)
    return out, sums, torch.zeros(2, dtype=torch.uint64)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values (FlashAttention, arXiv:2205.14135, appendix B.2)."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    grads = [torch.zeros(x.shape, dtype=dtype) for x in (query, key, value)]
    groups = query.shape[1] // key.shape[1]
    for rows, keys in sequences(cu_seq_q, cu_seq_k, max_q, max_k):
        q, k, v = split(query, key, value, rows, keys)
        grad, result = (x[rows].transpose(0, 1).to(dtype) for x in (grad_out, out))
        weights = (masked_scores(q, k, scale, window_size) - lse[:, rows, None]).exp()
        grad_scores = weights * (grad @ v.transpose(1, 2) - (grad * result).sum(-1, keepdim=True))
        grad_scores *= q.shape[-1] ** -0.5 if scale is None else scale
        grads[0][rows] = (grad_scores @ k).transpose(0, 1)
        for total, part in ((grads[1], grad_scores.transpose(1, 2) @ q), (grads[2], weights.transpose(1, 2) @ grad)):
            total[keys] = part.unflatten(0, (-1, groups)).sum(1).transpose(0, 1)
    return grads[0].to(query.dtype), grads[1].to(key.dtype), grads[2].to(value.dtype)


def sequences(queries: Tensor, keys: Tensor | None, max_q: int, max_k: int) -> Iterator[tuple[slice, slice]]:
    """The rows of each sequence's queries and of its keys."""
    assert keys is not None and queries.diff().max() <= max_q and keys.diff().max() <= max_k
    return zip(*([slice(*pair) for pair in pairwise(bounds.tolist())] for bounds in (queries, keys)), strict=True)


def split(query: Tensor, key: Tensor, value: Tensor, rows: slice, keys: slice) -> tuple[Tensor, Tensor, Tensor]:
    """One sequence's queries, keys and values, each [H, L, D] in float32 or float64."""
    groups = query.shape[1] // key.shape[1]
    dtype = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (x[part].transpose(0, 1).to(dtype) for x, part in ((query, rows), (key, keys), (value, keys)))
    return q, k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)


def masked_scores(q: Tensor, k: Tensor, scale: float | None, window_size: list[int] | None) -> Tensor:
    """[H, queries, keys], minus infinity where a token does not look; sequences of both end together."""
    assert window_size is not None
    left, right = window_size
    places = torch.arange(q.shape[1]) + k.shape[1] - q.shape[1]
    distance = places[:, None] - torch.arange(k.shape[1])
    is_seen = ((distance >= -right) | (right < 0)) & ((distance <= left) | (left < 0))
    scores = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return scores.masked_fill(~is_seen, -torch.inf)
