"""Log-probabilities and entropies of packed tokens, without ever holding [T, V] logits.

Letters: ``T`` tokens, ``M`` tokens asked for, ``E`` hidden size, ``V`` vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rlightning.types import RolloutBatch

CHUNK_TOKENS = 4096
"""Tokens whose logits are held at a time: 4,096 x 151,936 x 4 bytes is 2.5 GB."""


def packed_logprobs(
    model: PreTrainedModel, batch: RolloutBatch, *, temperature: float = 1.0, needs_entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of each completion token under the model.

    Args:
        model: a causal language model loaded with :data:`~rlightning.models.attention.PACKED_ATTENTION`.
        batch: on the model's device.
        temperature: logits are divided by it, as the sampler did.
        needs_entropy_grad: whether the entropies are differentiated.

    Returns:
        [T] log-probabilities and [T] entropies in nats, float32; 0 outside the completion mask.
    """
    if isinstance(model, FSDPModule):
        # The same as a method, around which FSDP gathers the weights that are used outside of forward().
        compute: Any = model.compute_packed_logprobs
        values: tuple[Tensor, Tensor] = compute(batch, temperature, needs_entropy_grad)
        return values
    return compute_packed_logprobs(model, batch, temperature, needs_entropy_grad)


def compute_packed_logprobs(
    model: PreTrainedModel, batch: RolloutBatch, temperature: float, needs_entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    """What :func:`packed_logprobs` returns, from a model whose weights are all there."""
    hidden: Tensor = model.base_model(
        input_ids=batch.token_ids[None],
        position_ids=batch.position_ids[None],
        use_cache=False,
        cu_seq_lens_q=batch.cu_seqlens,
        cu_seq_lens_k=batch.cu_seqlens,
        max_length_q=batch.max_length,
        max_length_k=batch.max_length,
    ).last_hidden_state[0]
    asked = batch.completion_index
    # the hidden state before a token predicts it
    picked, entropy = chunked_logprobs(
        hidden[asked - 1],
        model.get_output_embeddings().weight,
        batch.token_ids[asked],
        temperature=temperature,
        softcap=getattr(model.config.get_text_config(), "final_logit_softcapping", None),
        needs_entropy_grad=needs_entropy_grad,
    )
    zeros = hidden.new_zeros(batch.num_tokens, dtype=torch.float32)
    return zeros.index_put((asked,), picked), zeros.index_put((asked,), entropy)


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    needs_entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-softmax of ``hidden @ weight.T`` at ``targets``, and its entropy, a chunk of tokens at a time.

    The backward pass computes each chunk's logits again, so no more than one chunk's are ever held.

    Args:
        hidden: [M, E].
        weight: [V, E], the output embedding's.
        targets: [M] int64.
        temperature: logits are divided by it.
        softcap: logits are squashed to this size by tanh first (Gemma 2, arXiv:2408.00118, section 2).
        needs_entropy_grad: whether the entropies are differentiated.

    Returns:
        [M] log-probabilities and [M] entropies, float32.
    """
    compute = _compiled() if hidden.is_cuda else _logprobs_and_entropy
    results = []
    for h, t in zip(torch.split(hidden, CHUNK_TOKENS), torch.split(targets, CHUNK_TOKENS), strict=True):
        if torch.is_grad_enabled():
            results.append(
                checkpoint(compute, h, weight, t, temperature, softcap, needs_entropy_grad, use_reentrant=False)
            )
        else:
            # detached, so that an actor's and a frozen reference's weights do not make two compiled functions
            results.append(compute(h, weight.detach(), t, temperature, softcap, False))
    return torch.cat([r[0] for r in results]), torch.cat([r[1] for r in results])


def compute_logits(hidden: Tensor, weight: Tensor, softcap: float | None) -> Tensor:
    """``hidden @ weight.T``, squashed where there is a soft cap: [M, V] float32."""
    logits = (hidden @ weight.to(hidden.dtype).T).float()
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _logprobs_and_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, softcap: float | None, needs_entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    logits = compute_logits(hidden, weight, softcap) / temperature
    normalizer = logits.logsumexp(-1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - normalizer
    if not needs_entropy_grad:
        logits, normalizer = logits.detach(), normalizer.detach()
    table = logits - normalizer[:, None]
    return logprobs, -(table.exp() * table).sum(-1)


@functools.cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_logprobs_and_entropy, dynamic=True)
