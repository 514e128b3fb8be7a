"""The kernels of FlashAttention 4 over packed sequences (PyPI ``flash-attn-4``), as operators with a gradient.

``torch.compile`` cannot trace the package: its forward and its backward are custom operators. Whether the package can
be used is found out by :mod:`~rlightning.models.flash_attention_trial`.

Letters: ``H`` query heads, ``K`` key/value heads, ``D`` head size, ``T`` tokens, ``N`` sequences.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

INTERFACE = "flash_attn.cute.interface"
"""Module of the package ``flash-attn-4``."""


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | tuple[Tensor, Tensor],
    max_length: int | tuple[int, int],
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Compute causal attention over packed sequences with FlashAttention 4. Arguments and result are those of
    :func:`~rlightning.models.attention.varlen_attention`.

    The maximum length is not passed to the package, which would compile separate kernels for short sequences.
    """
    bounds = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
    tokens_left = None if window is None else window - 1
    out: Tensor = attend(q.contiguous(), k.contiguous(), v.contiguous(), *bounds, scaling, tokens_left)[0]
    return out


@torch.library.custom_op("rlightning::flash_attention_4", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scaling: float | None,
    tokens_left: int | None = None,
    is_causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the result [T, H, D] and the log-sum-exps [H, T], of which the result has a gradient.

    Args:
        q: [T, H, D]; keys and values are [T', K, D]; all contiguous.
        cu_seqlens_q: [N+1] int32, bounds of the queries; likewise of the keys, which end together if ``is_causal``.
        scaling: factor of the dot products; None for ``D ** -0.5``.
        tokens_left: number of earlier tokens that a token attends to; None for all.
        is_causal: whether a token attends to none after it; otherwise to all of its sequence.
    """
    result: tuple[Tensor, Tensor] = import_module(INTERFACE).flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        softmax_scale=scaling,
        causal=is_causal,
        window_size=(tokens_left, None),
        return_lse=True,
    )
    return result


@attend.register_fake
def _(q: Tensor, *_others: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@torch.library.custom_op("rlightning::flash_attention_4_backward", mutates_args=())
def differentiate(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scaling: float | None,
    tokens_left: int | None = None,
    is_causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values of :func:`attend`, for a given result and log-sum-exps."""
    # The package has no public function for its backward alone; torch's integration calls this function, too.
    grads: tuple[Tensor, ...] = import_module(INTERFACE)._flash_attn_bwd(
        q,
        k,
        v,
        out,
        grad.contiguous(),
        lse,
        softmax_scale=scaling,
        causal=is_causal,
        window_size_left=tokens_left,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return grads[0], grads[1], grads[2]


@differentiate.register_fake
def _(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_others: object) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scaling, ctx.tokens_left, ctx.is_causal = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse = ctx.saved_tensors
    grads = differentiate(
        grad, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, ctx.scaling, ctx.tokens_left, ctx.is_causal
    )
    return *grads, None, None, None, None, None


attend.register_autograd(_differentiate, setup_context=_save)
