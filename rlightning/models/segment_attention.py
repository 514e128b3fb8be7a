"""Attention over sequences with shared prefixes, without copies of the shared keys and values.

::

    a b c d e          part 0, causal: own tokens of each sequence among themselves
          x            part 1: x y z attend to a b
        y z            part 2: x     attends to c

A segment is a run of tokens that the same sequences share. All of its queries, which lie side by side, attend to its
keys in one call of the kernel, and segments of one depth in the tree are one call. With ``o_i`` and ``l_i``, result and
log-sum-exp of part ``i``, attention over all keys is

    l = log sum_i exp(l_i),    o = sum_i exp(l_i - l) o_i

A part's backward pass with ``o`` and ``l`` in place of its own results has the weights of the whole softmax, and so the
part's share of the gradient (FlashAttention, arXiv:2205.14135, appendix B.2; over blocks of keys as in Ring Attention,
arXiv:2310.01889). The kernel returns a shared key's gradient summed over all sequences that share it.

Letters: ``U`` tokens that are computed, ``N`` sequences, ``H`` query heads, ``K`` key/value heads, ``D`` head size.
"""

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from rlightning.models import flash_attention_4
from rlightning.torch_internals import varlen_attn_backward

_TAKES_ENABLE_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters


def shared_heads(query: Tensor, key: Tensor) -> dict[str, Any]:
    """Return the argument by which ``varlen_attn`` accepts fewer key/value heads than query heads; torch 2.11 needs
    none.
    """
    return {"enable_gqa": True} if _TAKES_ENABLE_GQA and query.shape[1] != key.shape[1] else {}


class _Part(NamedTuple):
    """One call of the kernel: bounds of queries and keys [B+1], maximum numbers of both, and whether it is causal."""

    queries: Tensor
    keys: Tensor
    max_queries: int
    max_keys: int
    is_causal: bool

    @property
    def window(self) -> tuple[int, int]:
        """Numbers of tokens before and after a query that it attends to, as ``varlen_attn`` takes them."""
        return (-1, 0) if self.is_causal else (-1, -1)


def segment_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    segments: Tensor,
    max_segment: tuple[int, int],
    scaling: float | None,
    *,
    has_flash_attention: bool = False,
) -> Tensor:
    """Compute causal attention over packed sequences with shared prefixes, whose keys and values are not copied, by
    several calls of a kernel.

    Args:
        q: [U, H, D]; keys and values are [U, K, D].
        cu_seqlens: [N+1] int32, the first of each sequence's own tokens, and ``U``.
        max_length: maximum number of a sequence's own tokens, or more.
        segments: see :class:`~rlightning.types.shared_prefixes.SharedPrefixes`.
        max_segment: maximum numbers of a segment's queries and of its keys, or more; both at least 2.
        scaling: factor of the dot products; None for ``D ** -0.5``.
        has_flash_attention: whether the kernel is FlashAttention 4's, and not that of ``varlen_attn``.

    Returns:
        [U, H, D].
    """
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    numbers = max_length, *max_segment, scaling, has_flash_attention
    result: tuple[Tensor, Tensor] = _attend(q, k, v, cu_seqlens, segments, *numbers)
    return result[0]


@torch.library.custom_op("rlightning::segment_attention", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    segments: Tensor,
    max_length: int,
    max_queries: int,
    max_keys: int,
    scale: float | None,
    has_flash_attention: bool,
) -> tuple[Tensor, Tensor]:
    """Return attention's result [U, H, D] and its log-sum-exps [H, U].

    This is a custom operator, so that torch.compile makes one graph for prefix trees of all depths, and saves only its
    inputs and outputs for the backward pass.
    """
    merged: tuple[Tensor, Tensor] | None = None
    for part in _parts(cu_seqlens, segments, max_length, max_queries, max_keys):
        if has_flash_attention:
            bounds = part.queries, part.keys
            result = flash_attention_4.attend(query, key, value, *bounds, scale, is_causal=part.is_causal)
        else:
            result = _varlen_attend(query, key, value, part, scale)
        merged = result if merged is None else _merge(merged, result)
    assert merged is not None
    return merged[0].to(query.dtype), merged[1]


def _varlen_attend(
    query: Tensor, key: Tensor, value: Tensor, part: _Part, scale: float | None
) -> tuple[Tensor, Tensor]:
    result = varlen_attn(
        *(query, key, value, part.queries, part.keys, part.max_queries, part.max_keys),
        return_aux=AuxRequest(lse=True),
        scale=scale,
        window_size=part.window,
        **shared_heads(query, key),
    )
    assert isinstance(result, tuple)
    return result


def _merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Combine attention over the keys of two parts, in at least float32.

    Args:
        first: result [U, H, D] and log-sum-exps [H, U].
        second: the same of a part in which a query may have no key; FlashAttention 2 returns infinity for it, and
            FlashAttention 4 minus infinity.
    """
    lse = second[1].masked_fill(second[1].isposinf(), -torch.inf)
    total = torch.logaddexp(first[1], lse)
    weights = [(one - total).exp().T.unsqueeze(-1) for one in (first[1], lse)]
    return (first[0] * weights[0]).addcmul_(second[0], weights[1]), total


def _parts(cu_seqlens: Tensor, segments: Tensor, max_length: int, max_queries: int, max_keys: int) -> Iterator[_Part]:
    """Yield the calls of the kernel."""
    yield _Part(cu_seqlens, cu_seqlens, max_length, max_length, True)
    for queries, keys in segments.unflatten(0, (-1, 2)):
        yield _Part(queries, keys, max_queries, max_keys, False)


@_attend.register_fake
def _attend_shapes(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    lse = query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)
    return torch.empty_like(query), lse


@torch.library.custom_op("rlightning::segment_attention_backward", mutates_args=())
def _attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    segments: Tensor,
    max_length: int,
    max_queries: int,
    max_keys: int,
    scale: float | None,
    has_flash_attention: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    grad, sums = grad.contiguous(), list[Tensor]()
    tensors = grad, query, key, value, out, lse
    for part in _parts(cu_seqlens, segments, max_length, max_queries, max_keys):
        bounds = part.queries, part.keys
        if has_flash_attention:
            grads = flash_attention_4.differentiate(*tensors, *bounds, scale, is_causal=part.is_causal)
        else:
            longest = part.max_queries, part.max_keys
            grads = varlen_attn_backward(*tensors, *bounds, *longest, part.window, scale=scale)
        sums = [total.add_(one) for total, one in zip(sums, grads, strict=True)] if sums else list(grads)
    return sums[0], sums[1], sums[2]


@_attend_backward.register_fake
def _attend_backward_shapes(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, ...]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, cu_seqlens, segments, *ctx.numbers = inputs
    ctx.save_for_backward(query, key, value, *output, cu_seqlens, segments)


def _differentiate(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    return (*_attend_backward(grad, *ctx.saved_tensors, *ctx.numbers), *[None] * (2 + len(ctx.numbers)))


_attend.register_autograd(_differentiate, setup_context=_save)
