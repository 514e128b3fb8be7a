"""Log-probabilities and entropies from an output layer, in chunks of tokens, so that [M, V] logits need not be stored.

    forward    a chunk's hidden states -> logits [C, V] -> normalizer, target's logit and entropy of each token
    backward   the logits, kept or recomputed -> their gradient, in place -> gradients [C, E], and a summand of [V, E]

``top_p``, ``top_k`` and ``min_p`` truncate a token's distribution to a support, which is fixed when the token is
sampled (DeepSeek-V3.2's "keep sampling mask", arXiv:2512.02556). With the support S and the scaled logits x of any
policy:

    log p[t] = x[t] - log sum_{v in S} exp(x[v])        H = -sum_{v in S} p[v] log p[v]

and logits outside of S have no gradient. The supports' logits [C, K] of each chunk are returned for this.

With tensor parallelism the weight is split over the vocabulary, and ``V`` is a rank's part of it: each rank computes
the three numbers and the supports' logits of its part, and the results are merged.

Letters: ``M`` tokens, ``C`` tokens of a chunk, ``E`` hidden size, ``V`` vocabulary, ``G`` ranks that share it, ``K``
tokens of the largest support.
"""

import functools
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from rlightning.models.layers import compiler_obstacle
from rlightning.parallel.gathering import local_box

CHUNK_BYTES = 5 << 28
"""Maximum bytes of a chunk's logits, in the dtype of the matrix product.

On a GPU a chunk needs no other memory: the kernels (logit_kernels.py) compute in float32 in registers, and write a few
numbers a token, or the gradient in place of the logits. On other devices float32 copies are needed in addition.
"""
FLOOR = -1e30
"""Logit of a token that does not exist: below every other logit, but finite, so that ``x - x`` is 0."""


@dataclass(frozen=True, slots=True)
class _Settings:
    """The arguments of :func:`chunked_logprobs`, and the ranks that split the vocabulary, ``group``; None without any.

    ``supports`` [M, K] are their token ids relative to this rank's part of the vocabulary; others are outside of it.
    ``temperature`` is [M, 1].
    """

    temperature: Tensor
    softcap: float | None
    needs_entropy_grad: bool
    keeps_logits: bool
    group: dist.ProcessGroup | None
    supports: Tensor


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    needs_entropy_grad: bool = False,
    keeps_logits: bool = False,
    supports: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of ``targets`` under the softmax of ``hidden @ weight.T``, and that softmax's
    entropies, computed in chunks of tokens.

    Products are in the dtype of ``hidden``, or autocast's; sums, including the weight's gradient over the chunks, in
    float32.

    Args:
        hidden: [M, E], the same on all ranks that share the vocabulary.
        weight: [V, E], of the output layer; a DTensor if split over the vocabulary, as by
            :func:`~rlightning.models.tensor_parallel.parallelize`.
        targets: [M] int64.
        temperature: divides the logits; one value for all tokens, or [M]; above 0.
        softcap: bound on logits, applied first by tanh (Gemma 2, arXiv:2408.00118, section 2).
        needs_entropy_grad: whether the entropies are differentiated.
        keeps_logits: keep all logits [M, V] until the backward pass, which otherwise recomputes each chunk's, so that
            only one chunk's are in memory. Results are bit-equal.
        supports: [M, K], token ids to which each distribution is truncated, padded with -1; a row of only -1 is not
            truncated. None if no distribution is truncated.

    Returns:
        [M] log-probabilities and [M] entropies in nats, float32, or float64 for float64 ``hidden``.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    if isinstance(temperature, Tensor):
        temperature = temperature[:, None]
    else:
        temperature = hidden.new_full((len(hidden), 1), temperature, dtype=_wide(hidden.dtype))
    group, own_targets = None, targets
    own_supports = supports
    if own_supports is None:
        own_supports = torch.empty(len(targets), 0, dtype=torch.int32, device=targets.device)
    if isinstance(weight, DTensor):
        group = weight.device_mesh.get_group()
        first = local_box(weight).offset[0]
        own_targets, own_supports = targets - first, (own_supports - first).where(own_supports >= 0, -1)
        weight = weight.to_local()
    keeps_logits = keeps_logits and torch.is_grad_enabled()
    settings = _Settings(temperature, softcap, needs_entropy_grad, keeps_logits, group, own_supports)
    logprobs, entropy, logits = _ChunkedLogprobs.apply(hidden, weight, own_targets, settings)  # type: ignore[no-untyped-call]
    if supports is None:
        return logprobs, entropy
    is_kept = supports >= 0
    scaled = scale_logits(logits, temperature, softcap)
    normalizer, truncated_entropy = normalize(scaled.where(is_kept, FLOOR))
    truncated = scaled.where(supports == targets[:, None], 0.0).sum(-1) - normalizer
    is_cut = is_kept.any(-1)
    entropy = truncated_entropy.where(is_cut, entropy)
    return truncated.where(is_cut, logprobs), entropy if needs_entropy_grad else entropy.detach()


class _ChunkedLogprobs(torch.autograd.Function):
    """Computes untruncated log-probabilities [M] and entropies [M], and the logits [M, K] of the supports."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = hidden.new_empty(3, len(hidden), dtype=_wide(hidden.dtype))
        support_logits = found.new_empty(settings.supports.shape)
        ctx.chunks = deque[tuple[slice, Tensor]]()
        for own, logits in _chunks(hidden, weight.to(hidden.dtype), is_kept=settings.keeps_logits):
            summary = _kernels(logits).summarize_logits(
                logits, targets[own], settings.temperature[own], settings.softcap
            )
            found[:, own] = torch.stack(summary)
            places, is_here = _find_places(settings.supports[own], logits)
            support_logits[own] = logits.gather(1, places).where(is_here, 0.0)
            if settings.keeps_logits:
                ctx.chunks.append((own, logits))
        normalizer, picked, entropy = merge_parts(_gather(found, settings.group))
        if settings.group is not None and support_logits.numel():
            dist.all_reduce(support_logits, group=settings.group)
        ctx.save_for_backward(hidden, weight, targets, normalizer, entropy)
        ctx.settings = settings
        if not settings.needs_entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return picked - normalizer, entropy, support_logits

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor, grad_supports: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        settings: _Settings = ctx.settings
        hidden, weight, targets, normalizer, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=_wide(hidden.dtype)) if needs_weight else None
        rounded = weight.to(hidden.dtype)
        kept, ctx.chunks = ctx.chunks, deque()  # overwritten and freed here: a second backward pass recomputes them
        for own, logits in _take_all(kept) if kept else _chunks(hidden, rounded):
            places, is_here = _find_places(settings.supports[own], logits)
            _kernels(logits).differentiate_logits(
                logits,
                targets[own],
                normalizer[own],
                entropy[own],
                grad_logprobs[own],
                grad_entropy[own] if settings.needs_entropy_grad else None,
                settings.temperature[own],
                settings.softcap,
            )
            logits.scatter_add_(1, places, grad_supports[own].where(is_here, 0.0).to(logits.dtype))
            if grad_hidden is not None:
                torch.mm(logits, rounded, out=grad_hidden[own])
            if grad_weight is not None:
                add_product(grad_weight, logits.T, hidden[own])
            del logits  # its memory is freed after the last chunk, before the weight's gradient is rounded
        if grad_hidden is not None and settings.group is not None:
            dist.all_reduce(grad_hidden, group=settings.group)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def _find_places(token_ids: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of tokens' logits, 0 for other ranks', and which of them this rank has: each [C, K]."""
    is_here = (token_ids >= 0) & (token_ids < logits.shape[1])
    return token_ids.where(is_here, 0).long(), is_here


def chunk_tokens(row_bytes: int) -> int:
    """Return the number of tokens in a chunk of logits if one token's logits take ``row_bytes`` bytes: a power of two,
    so that matrix products fill whole tiles.

    For example 4,096 for 151,936 bfloat16 logits, with which 128 of an H100's 132 processors are busy.
    """
    return 1 << max(CHUNK_BYTES // row_bytes, 1).bit_length() - 1


def _chunks(hidden: Tensor, weight: Tensor, *, is_kept: bool = False) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of tokens and their logits [C, V]; unless they are to be kept, all chunks use the same memory."""
    num_tokens = len(hidden)
    size = min(chunk_tokens(len(weight) * hidden.dtype.itemsize), num_tokens)
    memory = hidden.new_empty(0 if is_kept else size, len(weight))
    for start in range(0, num_tokens, max(size, 1)):
        end = min(start + size, num_tokens)
        own = hidden.new_empty(end - start, len(weight)) if is_kept else memory[: end - start]
        yield slice(start, end), torch.mm(hidden[start:end], weight.T, out=own)


def _take_all(chunks: deque[tuple[slice, Tensor]]) -> Iterator[tuple[slice, Tensor]]:
    """Yield and remove each chunk, so that its memory is free once the next one is taken."""
    while chunks:
        yield chunks.popleft()


def scale_logits(logits: Tensor, temperature: float | Tensor, softcap: float | None) -> Tensor:
    """Return logits [C, V] in at least float32, bounded by ``softcap`` (None for no bound) and then divided by the
    temperature, a number or [C, 1].
    """
    logits = logits.to(_wide(logits.dtype))
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits / temperature


def summarize_logits(
    logits: Tensor, targets: Tensor, temperature: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-sum-exp of each token's logits, its target's logit, and the entropy of its softmax, over this
    rank's part of the vocabulary.

    Args:
        logits: [C, V].
        targets: [C]; a target outside of 0 to V - 1 belongs to another rank.
        temperature: [C, 1].
        softcap: see :func:`chunked_logprobs`.

    Returns:
        Each [C]: the log-sum-exp of the logits, the target's logit (0 if it is another rank's), and the entropy of
        their softmax.
    """
    scaled = scale_logits(logits, temperature, softcap)
    normalizer, entropy = normalize(scaled)
    places, is_here = _find_places(targets[:, None], scaled)
    return normalizer, scaled.gather(1, places).where(is_here, 0.0)[:, 0], entropy


def normalize(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp of logits, and the entropy of their softmax, over the last axis."""
    largest = scaled.detach().amax(-1)
    shifted = scaled - largest[:, None]
    weights = shifted.exp()
    total = weights.sum(-1)
    # two terms of the same sign, so that nothing cancels
    return largest + total.log(), total.log() - (weights * shifted).sum(-1) / total


def merge_parts(parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-sum-exp, the target's logit and the entropy of each token over the whole vocabulary, each [M],
    from those over the ranks' parts.

    Args:
        parts: [G, 3, M], from :func:`summarize_logits`. The total entropy is that of the choice of a part, plus the
            mean of the parts' own entropies.
    """
    normalizers, picked, entropies = parts.unbind(1)
    normalizer = normalizers.logsumexp(0)
    log_chances = normalizers - normalizer
    return normalizer, picked.sum(0), (log_chances.exp() * (entropies - log_chances)).sum(0)


def differentiate_logits(
    logits: Tensor,
    targets: Tensor,
    normalizer: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    temperature: Tensor,
    softcap: float | None,
) -> None:
    """Overwrite a chunk's logits with the loss's gradient with respect to them, from the gradients with respect to
    their log-probabilities and entropies.

    With the softmax p of the scaled logits x, the gradient of log p[t] is ``1[v = t] - p[v]``, that of the entropy H is
    ``-p[v] (log p[v] + H)``. Arguments are [C], except for the logits [C, V] and the temperature [C, 1]; normalizer and
    entropy are those over all ranks' logits.
    """
    scaled = scale_logits(logits, temperature, softcap)
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    table = scaled - normalizer[:, None]
    chances = table.exp()
    gradient = grad_logprobs[:, None] * (is_target.to(chances.dtype) - chances)
    if grad_entropy is not None:
        gradient = gradient - grad_entropy[:, None] * chances * (table + entropy[:, None])
    gradient = gradient / temperature
    if softcap is not None:
        gradient = gradient * (1 - (scaled * (temperature / softcap)).square())
    logits.copy_(gradient)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to ``total`` in place, in the dtype of ``total``."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:  # not on the CPU, where a product in bfloat16 is rounded before it is added
        total.add_(left @ right)


def _gather(found: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Gather a [3, M] tensor from each of G ranks: [G, 3, M]."""
    if group is None:
        return found[None]
    parts = found.new_empty(group.size(), *found.shape)
    dist.all_gather(list(parts), found, group=group)
    return parts


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _kernels(logits: Tensor) -> ModuleType:
    """Return the module with the logit functions for the logits' dtype and device: the Triton kernels', or this one."""
    if logits.dtype != torch.float64 and _has_triton(logits.device):
        from rlightning.models import logit_kernels

        return logit_kernels
    return sys.modules[__name__]


@functools.cache
def _has_triton(device: torch.device) -> bool:
    """Return whether Triton kernels can run: they need CUDA and a compiler."""
    return device.type == "cuda" and compiler_obstacle(device) is None
