"""Attention over packed sequences, as an attention function of transformers.

The model runs on one row of ``T`` tokens; only attention has to know where a sequence ends. On CUDA in half precision
that is ``torch.nn.attention.varlen.varlen_attn``. Elsewhere (CPU, float32, attention windows) queries, keys and values
are padded to [N, longest] inside this function alone, which is exact: padding lies to the right of a causal sequence,
so no real token sees it.

Letters: ``H`` query heads, ``K`` key/value heads, ``D`` head size, ``T`` tokens, ``N`` sequences, ``L`` the longest.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

PACKED_ATTENTION = "rlightning_packed"
"""The name to load a model with: ``attn_implementation=PACKED_ATTENTION``."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence.

    Args:
        module: the attention layer, which transformers passes.
        query: [1, H, T, D].
        key: [1, K, T, D].
        value: [1, K, T, D].
        attention_mask: None; transformers makes no mask for a function that it has no mask for.
        cu_seq_lens_q: [N+1] int32.
        max_length_q: ``L``.
        scaling: of the dot products; None is ``D ** -0.5``.
        dropout: must be 0: a policy's log-probabilities are not random.
        sliding_window: how many tokens back a token sees, itself included; None is all.
        kwargs: of other attention functions; ``softcap`` and ``s_aux`` would change the result and are refused.

    Returns:
        [1, T, H, D], and no attention weights.
    """
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"{type(module).__name__} asks attention for '{name}', which packed attention lacks"
            )
    if cu_seq_lens_q is None:
        raise NotImplementedError(f"{type(module).__name__} does not tell attention where a sequence ends")
    if dropout:
        raise NotImplementedError(f"{type(module).__name__} asks attention for dropout={dropout}; a policy has none")
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    groups = query.shape[1] // key.shape[1]
    # [T, heads, D], the layout of packed kernels
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if sliding_window is not None and sliding_window >= max_length_q:
        sliding_window = None
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and sliding_window is None:
        out = _varlen_attention(q, k, v, groups, cu_seq_lens_q, max_length_q, scaling)
    else:
        out = _padded_attention(q, k, v, groups, cu_seq_lens_q, max_length_q, scaling, sliding_window)
    return out.unsqueeze(0), None


def _varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, groups: int, cu_seqlens: Tensor, max_length: int, scaling: float | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 has no enable_gqa here: each key/value head is repeated for its query heads
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    # (left, right) = (-1, 0) is causal attention, in every version since 2.11
    out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_length, max_length, scale=scaling, window_size=(-1, 0))
    assert isinstance(out, Tensor)  # a pair only with return_aux
    return out


def _padded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: int,
    cu_seqlens: Tensor,
    max_length: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    lengths = cu_seqlens.diff().long()
    num_sequences = lengths.numel()
    # token t of sequence n goes to row n * L + t: one copy there and one back, whatever the number of sequences
    shifts = torch.arange(num_sequences, device=q.device) * max_length - cu_seqlens[:-1]
    rows = torch.arange(q.shape[0], device=q.device) + shifts.repeat_interleave(lengths, output_size=q.shape[0])

    def pad(x: Tensor) -> Tensor:
        padded = x.new_zeros(num_sequences * max_length, *x.shape[1:]).index_copy(0, rows, x)
        return padded.view(num_sequences, max_length, *x.shape[1:]).transpose(1, 2)  # [N, heads, L, D]

    mask = None
    if window is not None:
        positions = torch.arange(max_length, device=q.device)
        distance = positions[:, None] - positions[None, :]
        mask = (distance >= 0) & (distance < window)
    out = scaled_dot_product_attention(
        pad(q), pad(k), pad(v), attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=groups > 1
    )
    return out.transpose(1, 2).flatten(0, 1).index_select(0, rows)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
