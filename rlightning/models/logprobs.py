"""Log-probabilities and entropies of packed tokens.

Letters: ``T`` tokens.
"""

from typing import Protocol, runtime_checkable

from torch import Tensor
from transformers import PreTrainedModel

from rlightning.models.architecture import can_share_prefixes
from rlightning.models.attention import packed_inputs
from rlightning.models.counts import read_setting
from rlightning.models.output_layer import chunked_logprobs
from rlightning.parallel.sharding import release_without_gradient
from rlightning.types import RolloutBatch


@runtime_checkable
class ShardedPolicy(Protocol):
    """A model sharded by FSDP that has its own method for log-probabilities, which :func:`packed_logprobs` calls."""

    def compute_packed_logprobs(
        self, batch: RolloutBatch, temperature: float, needs_entropy_grad: bool, keeps_logits: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probability and entropy of each sampled token, [T] each. FSDP gathers weights for this call as
        for ``forward()``, so that every rank must make it.
        """


def packed_logprobs(
    model: PreTrainedModel,
    batch: RolloutBatch,
    *,
    temperature: float = 1.0,
    needs_entropy_grad: bool = False,
    keeps_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability and entropy of each sampled token under the model.

    Args:
        model: a causal language model loaded with :data:`~rlightning.models.attention.PACKED_ATTENTION`.
        batch: a batch on the model's device.
        temperature: divides the logits, as in the sampler; replaced by a prompt's own temperature.
        needs_entropy_grad: whether the entropies are differentiated.
        keeps_logits: keep the logits until the backward pass, rather than compute them twice.

    Returns:
        [T] log-probabilities and [T] entropies in nats, float32; 0 where not sampled. Both are those of the
        distributions truncated to ``batch.supports``, if that is set.
    """
    if isinstance(model, ShardedPolicy):
        values = model.compute_packed_logprobs(batch, temperature, needs_entropy_grad, keeps_logits)
        release_without_gradient(model)
        return values
    return compute_packed_logprobs(model, batch, temperature, needs_entropy_grad, keeps_logits)


def compute_packed_logprobs(
    model: PreTrainedModel,
    batch: RolloutBatch,
    temperature: float = 1.0,
    needs_entropy_grad: bool = False,
    keeps_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability and entropy of each sampled token, [T] each, under a model whose weights are not
    sharded, or that FSDP has gathered; see :func:`packed_logprobs`.
    """
    # Another model, such as a critic, may mix tokens in other ways than the actor, for which the micro-batch was built.
    shared = batch.shared
    if shared is not None and not can_share_prefixes(model.config, batch.token_ids.device.type):
        shared = None
    inputs = packed_inputs(batch.token_ids, batch.position_ids, batch.cu_seqlens, batch.max_length, shared)
    hidden: Tensor = model.base_model(**inputs).last_hidden_state[0]
    asked = batch.sampled_index
    before = asked - 1 if shared is None else shared.places[asked - 1]
    temperatures = batch.temperatures(temperature)
    # the hidden state before a token predicts that token
    picked, entropy = chunked_logprobs(
        hidden[before],
        model.get_output_embeddings().weight,
        batch.token_ids[asked],
        temperature=batch.to_tokens(temperatures)[asked] if isinstance(temperatures, Tensor) else temperatures,
        softcap=read_setting(model.config, "final_logit_softcapping"),
        needs_entropy_grad=needs_entropy_grad,
        keeps_logits=keeps_logits,
        supports=batch.supports,
    )
    zeros = picked.new_zeros(batch.num_tokens)
    return zeros.index_put((asked,), picked), zeros.index_put((asked,), entropy)
