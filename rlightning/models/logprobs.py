"""Log-probabilities and entropies of packed tokens.

Letters: ``T`` tokens.
"""

from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from rlightning.models.output_layer import chunked_logprobs
from rlightning.types import RolloutBatch


def packed_logprobs(
    model: PreTrainedModel, batch: RolloutBatch, *, temperature: float = 1.0, needs_entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of each sampled token under the model.

    Args:
        model: a causal language model loaded with :data:`~rlightning.models.attention.PACKED_ATTENTION`.
        batch: on the model's device.
        temperature: logits are divided by it, as the sampler did; those of a prompt with a temperature of its own by
            that.
        needs_entropy_grad: whether the entropies are differentiated.

    Returns:
        [T] log-probabilities and [T] entropies in nats, float32; 0 where not sampled.
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
    asked = batch.sampled_index
    temperatures = batch.temperatures(temperature)
    # the hidden state before a token predicts it
    picked, entropy = chunked_logprobs(
        hidden[asked - 1],
        model.get_output_embeddings().weight,
        batch.token_ids[asked],
        temperature=batch.to_tokens(temperatures)[asked] if isinstance(temperatures, Tensor) else temperatures,
        softcap=getattr(model.config.get_text_config(), "final_logit_softcapping", None),
        needs_entropy_grad=needs_entropy_grad,
    )
    zeros = picked.new_zeros(batch.num_tokens)
    return zeros.index_put((asked,), picked), zeros.index_put((asked,), entropy)
