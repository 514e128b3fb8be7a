"""Triton versions of :mod:`~rlightning.models.output_layer`'s functions on a chunk's logits, one program per token.

Each reads a row once, in blocks. The first keeps the largest logit so far and rescales the sums for softmax and entropy
when it grows (online softmax, arXiv:1805.02867). The second overwrites the logits with their gradient.

Letters: ``C`` tokens of a chunk, ``V`` vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Logits of a row that a kernel's program processes at once."""
NUM_WARPS = 8
FLOOR = tl.constexpr(-1e30)
"""Value below every logit, but finite, so that its difference from itself is 0."""


def summarize_logits(
    logits: Tensor, targets: Tensor, temperature: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-sum-exp, target's logit and entropy of each row of logits [C, V], by a Triton kernel. Arguments and
    result are those of :func:`rlightning.models.output_layer.summarize_logits`.
    """
    num_tokens, num_logits = logits.shape
    found = torch.empty(3, num_tokens, dtype=torch.float32, device=logits.device)
    _summarize[(num_tokens,)](
        logits,
        targets,
        found,
        num_tokens,
        num_logits,
        1 / temperature,
        softcap or 1.0,
        has_softcap=softcap is not None,
        block=BLOCK,
        num_warps=NUM_WARPS,
    )
    normalizer, picked, entropy = found
    return normalizer, picked, entropy


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
    """Overwrite logits [C, V] with their gradient, by a Triton kernel. Arguments are those of
    :func:`rlightning.models.output_layer.differentiate_logits`.
    """
    num_tokens, num_logits = logits.shape
    _differentiate[(num_tokens,)](
        logits,
        targets,
        normalizer,
        entropy,
        grad_logprobs.contiguous(),
        None if grad_entropy is None else grad_entropy.contiguous(),
        num_logits,
        1 / temperature,
        softcap or 1.0,
        has_softcap=softcap is not None,
        has_entropy=grad_entropy is not None,
        block=BLOCK,
        num_warps=NUM_WARPS,
    )


@triton.jit
def _squash(x, softcap):  # type: ignore[no-untyped-def]
    """Return the hyperbolic tangent of ``x / softcap``."""
    return 2 * tl.sigmoid(2 * x / softcap) - 1


@triton.jit  # type: ignore[untyped-decorator]
def _summarize(  # type: ignore[no-untyped-def]
    logits,
    targets,
    found,
    num_tokens,
    num_logits,
    inverse_temperatures,
    softcap,
    has_softcap: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0)
    row = logits + token.to(tl.int64) * num_logits
    scale = tl.load(inverse_temperatures + token)
    largest = FLOOR
    total = tl.zeros([block], dtype=tl.float32)
    weighted = tl.zeros([block], dtype=tl.float32)
    for start in range(0, num_logits, block):
        at = start + tl.arange(0, block)
        x = tl.load(row + at, mask=at < num_logits, other=FLOOR).to(tl.float32)
        if has_softcap:
            x = tl.where(at < num_logits, softcap * _squash(x, softcap), x)
        x *= scale
        new = tl.maximum(largest, tl.max(x, 0))
        step = largest - new
        shrink = tl.exp(step)
        shifted = x - new
        weight = tl.exp(shifted)
        weighted = shrink * (weighted + step * total) + weight * shifted
        total = shrink * total + weight
        largest = new
    whole = tl.sum(total, 0)
    normalizer = largest + tl.log(whole)
    target = tl.load(targets + token)
    is_here = (target >= 0) & (target < num_logits)
    picked = tl.load(row + target, mask=is_here, other=0.0).to(tl.float32)
    if has_softcap:
        picked = softcap * _squash(picked, softcap)
    tl.store(found + token, normalizer)
    tl.store(found + num_tokens + token, picked * scale)
    tl.store(found + 2 * num_tokens + token, tl.log(whole) - tl.sum(weighted, 0) / whole)


@triton.jit  # type: ignore[untyped-decorator]
def _differentiate(  # type: ignore[no-untyped-def]
    logits,
    targets,
    normalizers,
    entropies,
    grads_logprob,
    grads_entropy,
    num_logits,
    inverse_temperatures,
    softcap,
    has_softcap: tl.constexpr,
    has_entropy: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0)
    row = logits + token.to(tl.int64) * num_logits
    scale = tl.load(inverse_temperatures + token)
    target = tl.load(targets + token)
    normalizer = tl.load(normalizers + token)
    grad_logprob = tl.load(grads_logprob + token)
    if has_entropy:
        entropy = tl.load(entropies + token)
        grad_entropy = tl.load(grads_entropy + token)
    for start in range(0, num_logits, block):
        at = start + tl.arange(0, block)
        x = tl.load(row + at, mask=at < num_logits, other=0.0).to(tl.float32)
        slope = scale
        if has_softcap:
            squashed = _squash(x, softcap)
            x = softcap * squashed
            slope = scale * (1 - squashed * squashed)
        logprob = x * scale - normalizer
        chance = tl.exp(logprob)
        gradient = grad_logprob * (tl.where(at == target, 1.0, 0.0) - chance)
        if has_entropy:
            gradient -= grad_entropy * chance * (logprob + entropy)
        tl.store(row + at, (gradient * slope).to(logits.dtype.element_ty), mask=at < num_logits)
